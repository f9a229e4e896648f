#!/usr/bin/env bash
# build_test.sh NAME KERNELS.o: builds tests/NAME.c for the GPU as build/gpu/NAME.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=$1 kernels=$2
cuda=${CUDA_HOME:-/usr/local/cuda}
mkdir -p build/gpu
cat > "build/gpu/$name.c" <<EOF
#define FEMTOTRON_IMPLEMENTATION
#include "femtotron.h"
#include "femtotron_zero.h"
#include "femtotron_tp.h"
#include "femtotron_pp.h"
#include "femtotron_llama.h"
#include "femtotron_io.h"
#include "tests/gpu/as_gpu.h"
#include "tests/$name.c"
EOF
${CC:-cc} -std=gnu11 -O2 -g -DFT_CUDA -DFT_CJSON -DFT_XXHASH -I. -Itests -I"$cuda/include" \
    "build/gpu/$name.c" "$kernels" -o "build/gpu/$name" -L"$cuda/lib64" -lcublasLt -lcudart \
    -lcjson -lxxhash -lcmocka -lstdc++ -lm -lpthread
