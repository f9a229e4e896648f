#!/bin/sh
# The trainer on fake GPUs: ranks that share one, ranks over NCCL, every stage, tp and pp, the plan,
# a table of GEMM algorithms, checkpoints that go from one to the other, and a launcher's process.
#
# usage: tests/test_fake_gpu.sh      builds and tests build/fake/train_llama
# Last line: "N passed, N failed".
in_memory=1
. "$(dirname "$0")/shell.sh"
built build/fake/train_llama
trainer=build/fake/train_llama

counting 250 >"$dir/data.txt"
small="--data $dir/data.txt --layers 2 --hidden 32 --heads 4 --kv-heads 2 --seq-len 16 --steps 3"
small="$small --device cuda --hash"

hash_of() { sed -n 's/^hash //p' "$dir/out"; }

# trains FLAGS...: must end well, as planned. Sets $hash, $loss.
# shellcheck disable=SC2086 # $small and $mesh are words
trains() {
    run $small "$@"
    status=$? hash=$(hash_of) loss=$(sed -n 's/^step 3\/3 | loss \([0-9.]*\).*/\1/p' "$dir/out")
    [ $status = 0 ] && [ -n "$hash" ] && grep -q 'equal to the plan' "$dir/out"
}

# same HASH FLAGS...: as `trains`, and with this hash.
same() {
    want=$1
    shift
    if ! trains "$@"; then fail "$*" "exit status $status, or not as planned"
    elif [ "$hash" != "$want" ]; then fail "$*" "hash $hash, not $want"
    else pass "$*"
    fi
}

trains --gpus 1 --dp 4 --micro-batch-size 2 || fail "4 ranks on one GPU" "exit status $status"
four=$hash
for stage in 1 2 3; do same "$four" --gpus 2 --dp 4 --micro-batch-size 2 --zero-stage $stage; done
for sac in selective full; do
    same "$four" --gpus 3 --dp 4 --micro-batch-size 2 --zero-stage 3 --sac $sac
done
for stage in 0 1 2 3; do
    same "$four" --transport nccl --dp 4 --micro-batch-size 2 --zero-stage $stage
done

# Meshes: the loss of one rank, whoever carries the traffic.
trains --micro-batch-size 8 || fail "one rank" "exit status $status"
one=$loss
for mesh in "--tp 2 --sp --micro-batch-size 8" "--pp 2 --micro-batch-size 2 --micro-batches 4" \
    "--pp 2 --micro-batch-size 2 --micro-batches 4 --pp-overlap 1 --schedule zb-h1" \
    "--dp 2 --tp 2 --pp 2 --micro-batch-size 1 --micro-batches 4 --zero-stage 3 --pp-overlap 1"; do
    first=
    for how in "--gpus 1" "--transport nccl"; do
        # shellcheck disable=SC2086
        if ! trains $how $mesh; then fail "$how $mesh" "exit status $status, or not as planned"
        elif [ "$loss" != "$one" ]; then fail "$how $mesh" "loss $loss, one rank has $one"
        elif [ -n "$first" ] && [ "$hash" != "$first" ]; then fail "$how $mesh" "another hash"
        else pass "$how $mesh"
        fi
        first=$hash
    done
done

# A table of GEMM algorithms is made once, then read.
trains --gemm-tune "$dir/table" --micro-batch-size 2 || fail "--gemm-tune" "exit status $status"
tuned=$hash lines=$(wc -l <"$dir/table")
same "$tuned" --gemm-tune "$dir/table" --micro-batch-size 2
check "--gemm-tune adds no line" "$(wc -l <"$dir/table") of $lines" \
    [ "$(wc -l <"$dir/table")" = "$lines" ]

# From NCCL to a GPU that is shared, and from there to other stages: as if nothing had been.
if grep -q FT_XXHASH build/features && grep -q FT_CJSON build/features; then
    trains --transport nccl --dp 2 --zero-stage 3 --micro-batch-size 2 \
        --checkpoint-dir "$dir/ck" --checkpoint-every 2 || fail "checkpoints" "exit status $status"
    through=$hash
    rm -rf "$dir/ck/$(ls "$dir/ck" | sort | tail -n 1)"
    run $small --gpus 1 --dp 2 --zero-stage 1 --micro-batch-size 2 --checkpoint-dir "$dir/ck" \
        --resume auto
    check "resumed on one GPU" "hash $(hash_of), not $through" [ "$(hash_of)" = "$through" ]
fi

# A launcher's process is one rank, with a GPU and its record alone.
RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 run $small --micro-batch-size 8
check "a launcher's only process" "$(cat "$dir/err")" \
    grep -q '^device  cuda, 1 rank as processes' "$dir/out"

# A signal while it waits for the other ends it at once.
# shellcheck disable=SC2086
RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 timeout --preserve-status -k 20 2 "$trainer" \
    $small --dp 2 --micro-batch-size 4 > "$dir/out" 2> "$dir/err"
status=$?
check "SIGTERM while ranks meet" "exit status $status" [ $status = 143 ]

refuse() { # WORDS FLAGS...
    words=$1
    shift
    run $small "$@"
    status=$?
    check "refuses $*" "exit status $status, $(cat "$dir/err")" \
        sh -c "[ $status != 0 ] && grep -q -e '$words' '$dir/err'"
}
RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 refuse 'for 4 ranks, WORLD_SIZE says 2' --dp 4
RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 refuse 'each process has one GPU' --gpus 1
refuse 'a GPU for each rank' --transport nccl --dp 4 --gpus 2 --micro-batch-size 2
FAKE_GPU_BYTES=20000000 refuse 'the limit is 20,000,000: nothing was allocated' --micro-batch-size 2
FAKE_GPUS=0 refuse 'no GPU is visible' --micro-batch-size 2
finish
