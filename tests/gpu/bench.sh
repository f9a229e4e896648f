#!/usr/bin/env bash
# bench.sh: Femtotron beside PyTorch + transformers on one GPU, in one run. Needs the CUDA Toolkit;
# torch and transformers for the other side, which is left out where they are missing.
set -uo pipefail
cd "$(dirname "$0")/../.."
mkdir -p build
arch=${GPU_ARCH:+GPU_ARCH=$GPU_ARCH}
make build/train_llama_cuda ${arch:+"$arch"} > build/bench_build.log 2>&1 ||
    { tail build/bench_build.log; exit 1; }
make -k build/gpu/test_kernels build/gpu/test_attention build/gpu/train_same ${arch:+"$arch"} \
    >> build/bench_build.log 2>&1 || echo "not all was built, see build/bench_build.log"
. tests/gpu/speed.sh

timed "73m mbs 8 x 1024" 1 $shape_73m --micro-batch-size 8 --seq-len 1024
timed "1b mbs 4 x 4096" 1 $shape_1b --micro-batch-size 4 --seq-len 4096
timed "1b mbs 4 x 4096 selective" 1 $shape_1b --micro-batch-size 4 --seq-len 4096 --sac selective
timed "1b mbs 4 x 4096 full" 1 $shape_1b --micro-batch-size 4 --seq-len 4096 --sac full
timed "8b's 4 layers mbs 4 x 4096" 1 $layer_8b --layers 4 --vocab 32768 --micro-batch-size 4 \
    --seq-len 4096
if [ -x build/gpu/test_kernels ]; then build/gpu/test_kernels --bench; fi
if [ -x build/gpu/test_attention ]; then build/gpu/test_attention --bench; fi
if [ "${1:-}" != ours ] && has_torch; then
    python3 tests/gpu/torch_peer.py bench 73m --mbs 8 --seq 1024 2>&1 | tail -n 1
    python3 tests/gpu/torch_peer.py bench 1b 2>&1 | tail -n 1
    if [ -x build/gpu/train_same ]; then # 1000 steps on the same data, from the same weights
        mkdir -p build/same
        echo "torch $(python3 tests/gpu/torch_peer.py same build/same 2>&1 | tail -n 1)"
        echo "ours  $(build/gpu/train_same build/same/weights.safetensors build/same/batches.bin \
            1000 16 256 | tail -n 1)"
    fi
fi
