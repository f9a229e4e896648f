# shellcheck shell=bash
# speed.sh: sourced by bench.sh, nccl.sh and scale.sh: the shapes that are measured, and how.

T=build/train_llama_cuda
tokens=build/bench_tokens.bin # any bytes: speed does not depend on them
shape_1b="--hidden 2048 --layers 16 --heads 32 --kv-heads 8 --intermediate 8192 --vocab 128256
    --tie-embeddings"
layer_8b="--hidden 4096 --heads 32 --kv-heads 8 --intermediate 14336"
shape_8b="$layer_8b --layers 32 --vocab 128256"
shape_73m="--hidden 1024 --layers 8 --heads 16 --kv-heads 4 --intermediate 2048 --vocab 1024"

[ -s $tokens ] || head -c 3000000 /dev/urandom > $tokens

# timed NAME GPUS FLAGS...: the trainer in bf16; tokens/s of a GPU and MFU, the median of the steps
# after the third, and the peak of the fullest rank. Returns 1 if it began
# and did not train to the end.
timed() {
    local name=$1 gpus=$2 log=build/bench_gpu.log status=0
    shift 2
    timeout -k 5 "${RUN_TIMEOUT:-300}" $T --device cuda --data $tokens --gpus "$gpus" --dtype bf16 \
        --steps "${STEPS:-13}" "$@" > $log 2>&1 < /dev/null || status=$?
    if ((status == 0)); then
        sed -n 's/.*| \([0-9]*\) tok\/s | MFU \([0-9.?%]*\) | peak \([0-9.]*\) MiB.*/\1 \2 \3/p' $log |
            tail -n +4 | sort -n | awk -v name="$name" -v gpus="$gpus" '
                {rate[NR] = $1; mfu[NR] = $2; peak = $3}
                END {k = int((NR + 1) / 2)
                     printf "ours  %s: %d tok/s a GPU, MFU %s, peak %.0f MiB\n", name, rate[k] / gpus,
                            mfu[k], peak}'
        return
    fi
    echo "ours  $name: status $status: $(grep -m 1 '^error' $log || tail -n 1 $log)"
    grep -q 'nothing was allocated' $log # too large for these GPUs: no fault
}

has_torch() { python3 -c 'import torch, transformers' 2> /dev/null; }
