#!/usr/bin/env bash
# bench.sh: Femtotron beside PyTorch + transformers on one GPU, in one run. Needs the CUDA Toolkit;
# torch and transformers for the other side, which is left out where they are missing.
set -uo pipefail
cd "$(dirname "$0")/../.."
T=build/train_llama_cuda
make build/train_llama_cuda ${GPU_ARCH:+GPU_ARCH="$GPU_ARCH"} > build/bench_gpu.log 2>&1 ||
    { tail build/bench_gpu.log; exit 1; }
head -c 3000000 /dev/urandom > build/bench_tokens.bin # any bytes: speed does not depend on them

# ours NAME FLAGS...: the median tokens/s after three steps, and the peak.
ours() {
    local name=$1
    shift
    $T --device cuda --gpus 1 --data build/bench_tokens.bin --dtype bf16 --steps 13 "$@" \
        > build/bench_gpu.log 2>&1 || { echo "FAIL $name: $(tail -n 1 build/bench_gpu.log)"; return; }
    sed -n 's/.*| \([0-9]*\) tok\/s | MFU \([0-9.?%]*\) | peak \([0-9.]*\) MiB.*/\1 \2 \3/p' \
        build/bench_gpu.log | tail -n +4 | sort -n |
        awk -v n="$name" '{r[NR] = $1; m[NR] = $2; p = $3}
            END {k = int((NR + 1) / 2); printf "ours  %s: %d tok/s, MFU %s, peak %d MiB\n", n, r[k], m[k], p}'
}

L1B="--hidden 2048 --layers 16 --heads 32 --kv-heads 8 --intermediate 8192 --vocab 128256
    --tie-embeddings"
L73="--hidden 1024 --layers 8 --heads 16 --kv-heads 4 --intermediate 2048 --vocab 1024"

ours "73m mbs 8 x 1024" $L73 --micro-batch-size 8 --seq-len 1024
ours "1b mbs 4 x 4096" $L1B --micro-batch-size 4 --seq-len 4096
ours "1b mbs 4 x 4096 selective" $L1B --micro-batch-size 4 --seq-len 4096 --sac selective
ours "1b mbs 4 x 4096 full" $L1B --micro-batch-size 4 --seq-len 4096 --sac full
ours "8b's 4 layers mbs 4 x 4096" --hidden 4096 --layers 4 --heads 32 --kv-heads 8 \
    --intermediate 14336 --vocab 32768 --micro-batch-size 4 --seq-len 4096
if [ -x build/gpu/test_kernels ]; then build/gpu/test_kernels --bench; fi
if [ -x build/gpu/test_attention ]; then build/gpu/test_attention --bench; fi
if [ "${1:-}" != ours ] && python3 -c 'import torch, transformers' 2> /dev/null; then
    python3 tests/gpu/torch_peer.py bench 73m --mbs 8 --seq 1024 2>&1 | tail -n 1
    python3 tests/gpu/torch_peer.py bench 1b 2>&1 | tail -n 1
    if [ -x build/gpu/train_same ]; then # 1000 steps on the same data, from the same weights
        mkdir -p build/same
        echo "torch $(python3 tests/gpu/torch_peer.py same build/same 2>&1 | tail -n 1)"
        echo "ours  $(build/gpu/train_same build/same/weights.safetensors build/same/batches.bin \
            1000 16 256 | tail -n 1)"
    fi
fi
