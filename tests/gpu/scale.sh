#!/usr/bin/env bash
# scale.sh [1b|8b...]: from 1 GPU to all of this host, over NCCL: equal hashes and the 48 cells of the
# memory tables at 8, then tokens/s of a GPU for every layout that the GPUs allow, beside FSDP2.
#
#   MBS="1 2 4"   micro-batch sizes, of 4096 tokens each
#   STEPS=13      steps of a run
#
# Needs torchrun, which starts a process for each GPU; torch and transformers for FSDP2's side.
set -uo pipefail
cd "$(dirname "$0")/../.."
mkdir -p build
make build/train_llama_cuda build/memory_tables_cuda ${GPU_ARCH:+GPU_ARCH="$GPU_ARCH"} \
    > build/scale_build.log 2>&1 || { tail build/scale_build.log; exit 1; }
. tests/gpu/speed.sh
export NCCL_NVLS_ENABLE=0
shapes=${*:-1b 8b}
command -v torchrun > /dev/null || { echo "error: no torchrun here: install PyTorch" >&2; exit 1; }
visible=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)
logs=build/gpu/scale
mkdir -p $logs
passed=0 failed=0
pass() { passed=$((passed + 1)); echo "ok   $1"; }
fail() { failed=$((failed + 1)); echo "FAIL $1"; }

processes() { # N PROGRAM FLAGS...: N processes with a GPU each
    local n=$1
    shift
    timeout -k 5 "${RUN_TIMEOUT:-600}" torchrun --no-python --nproc-per-node "$n" --master-port 29640 "$@"
}

# At dp 2 all stages have one hash, also that of two ranks on one GPU; NCCL's own sums depend on
# the number of ranks and on the collective, so beyond that a stage is compared with itself.
hash_of() { # N STAGE
    processes "$1" $T --device cuda --data LICENSE --dp "$1" --dtype bf16 --steps 4 \
        --micro-batch-size 1 --zero-stage "$2" --hash 2>&1 | sed -n 's/^hash //p'
}
for ((n = 2; n <= visible && n <= 8; n *= 2)); do
    hashes= same=1
    for stage in 0 1 2 3; do
        first=$(hash_of $n $stage) again=$(hash_of $n $stage)
        [ -n "$first" ] && [ "$first" = "$again" ] || same=0
        hashes+="$first "
    done
    if ((same)); then pass "dp $n over NCCL: every stage twice, each the same hash"
    else fail "dp $n over NCCL: a stage's hashes differ from run to run: $hashes"; fi
    if ((n > 2)); then echo "     hashes of stages 0 to 3: $hashes"; continue; fi
    hashes+=$($T --device cuda --gpus 1 --data LICENSE --dp 2 --dtype bf16 --steps 4 \
        --micro-batch-size 1 --hash 2>&1 | sed -n 's/^hash //p')
    if [ "$(echo $hashes | tr ' ' '\n' | sort -u | wc -l)" = 1 ]
    then pass "dp 2: stages 0 to 3, and two ranks on one GPU, one hash"
    else fail "dp 2: hashes $hashes"; fi
done

# The cells have 8 ranks: a process each, or as many as there are GPUs share them.
if ((visible >= 8)); then
    cells() { processes 8 build/memory_tables_cuda --device cuda "$@"; }
    how="8 processes over NCCL"
else
    cells() { build/memory_tables_cuda --device cuda --gpus $visible "$@"; }
    how="8 ranks on $visible GPUs"
fi
cells --csv --cells "${CELLS:-1-48}" > $logs/cells.csv 2> $logs/cells.err
if grep -q 'plan and run: 0 bytes' $logs/cells.err && ! grep -q 'does not fit' $logs/cells.csv
then pass "$how: plan = run in $(grep -cE '^[12],' $logs/cells.csv) cells of the memory tables"
else fail "$how: $(tail -n 1 $logs/cells.err) $(grep -c 'does not fit' $logs/cells.csv) do not fit"; fi

layouts() { # GPUS: a line for each
    local n=$1 stage
    if ((n == 1)); then echo ""; return; fi
    for stage in 1 2 3; do echo "--dp $n --zero-stage $stage"; done
    stage=$( ((n > 2)) && echo "--zero-stage 1")
    echo "--tp 2 --sp --dp $((n / 2)) $stage"
    echo "--pp 2 --micro-batches 8 --pp-overlap 1 --dp $((n / 2)) $stage"
    if ((n > 4)); then
        echo "--tp 2 --sp --pp 2 --micro-batches 8 --pp-overlap 1 --dp $((n / 4)) --zero-stage 1"
    fi
}
for shape in $shapes; do
    flags=shape_$shape
    for ((n = 1; n <= visible && n <= 8; n *= 2)); do
        for mbs in ${MBS:-1 2 4}; do
            while read -r layout; do
                timed "$shape, $n GPUs, $mbs x 4096 $layout" $n ${!flags} --seq-len 4096 \
                    --micro-batch-size $mbs $( ((n > 1)) && echo --transport nccl) $layout ||
                    failed=$((failed + 1))
            done < <(layouts $n)
            if ((n > 1)) && has_torch; then
                for masters in "" --masters; do
                    timeout 300 torchrun --nproc-per-node $n --master-port 29650 \
                        tests/gpu/torch_peer.py fsdp $shape --mbs $mbs $masters 2>&1 | tail -n 1
                done
            fi
        done
        if ((n > 1)); then
            $T --device cuda --data $tokens --gpus $n --transport nccl --dp $n ${!flags} --seq-len 4096 \
                --micro-batch-size 1 --dtype bf16 --steps 4 --zero-stage 3 --trace $logs/trace.json 2>&1 |
                grep '^overlap' | sed "s/^/      $shape, $n GPUs, ZeRO-3, 1 x 4096: /"
        fi
    done
done
echo "$passed passed, $failed failed"
((failed == 0))
