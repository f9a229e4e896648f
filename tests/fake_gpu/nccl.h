/* nccl.h: what Femtotron's headers use of NCCL, for fake_gpu.h. */

#ifndef FAKE_NCCL_H
#define FAKE_NCCL_H

#include <cuda_runtime.h>
#include <stddef.h>

typedef enum ncclResult_t {
    ncclSuccess = 0, ncclSystemError = 2, ncclInvalidArgument = 4, ncclInvalidUsage = 5,
    ncclInProgress = 7
} ncclResult_t;
typedef enum ncclDataType_t {
    ncclUint8 = 1, ncclInt32 = 2, ncclUint64 = 5, ncclFloat32 = 7, ncclBfloat16 = 9
} ncclDataType_t;
typedef enum ncclRedOp_t { ncclSum = 0 } ncclRedOp_t;
typedef struct fake_comm *ncclComm_t;
typedef struct ncclUniqueId { char internal[128]; } ncclUniqueId;
typedef struct ncclConfig_t { int blocking; } ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER { 1 }

const char *ncclGetErrorString(ncclResult_t result);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n, ncclUniqueId id, int rank,
                                    ncclConfig_t *config);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclAllGather(const void *in, void *out, size_t each, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void *in, void *out, size_t each, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream);

#endif /* FAKE_NCCL_H */
