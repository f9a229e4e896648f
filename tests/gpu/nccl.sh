#!/usr/bin/env bash
# nccl.sh [bench]: two GPUs of one host over NCCL, by each launcher that is here, beside the local
# transport; ranks that die, hang or disagree; with `bench` also speed beside PyTorch FSDP2.
set -uo pipefail
cd "$(dirname "$0")/../.."
T=build/train_llama_cuda
[ -x $T ] || make $T > /dev/null || exit 1
export NCCL_NVLS_ENABLE=0
logs=build/gpu/nccl
mkdir -p $logs
passed=0 failed=0
pass() { passed=$((passed + 1)); echo "ok   $1"; }
fail() { failed=$((failed + 1)); echo "FAIL $1"; }
hash_of() { grep -E '^hash' | awk '{print $2}'; }

limit="timeout -k 5 90" # of a run that is to end by itself
guard=

by_hand() { # RANK FLAGS...: this (sub)shell becomes one process of two, as a launcher would start it
    local rank=$1
    shift
    exec $guard env RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 \
        NCCL_COMM_ID=127.0.0.1:29611 $T --device cuda --data LICENSE "$@"
}
launch() { # LAUNCHER FLAGS...
    local by=$1
    shift
    case $by in
    torchrun) $limit torchrun --no-python --nproc-per-node 2 --master-port 29600 \
        $T --device cuda --data LICENSE "$@" 2>&1 ;;
    mpirun) $limit mpirun --allow-run-as-root --oversubscribe -n 2 $T --device cuda --data LICENSE "$@" \
        2>&1 ;;
    srun) $limit srun -n 2 $T --device cuda --data LICENSE "$@" 2>&1 ;;
    hand)
        guard=$limit
        by_hand 1 "$@" > $logs/rank1.log 2>&1 &
        (by_hand 0 "$@" 2>&1)
        wait $!
        guard=
        ;;
    threads) $limit $T --device cuda --data LICENSE --gpus 2 --transport nccl "$@" 2>&1 ;;
    local) $limit $T --device cuda --data LICENSE --gpus 2 "$@" 2>&1 ;;
    esac
}

few="--dp 2 --dtype bf16 --steps 4 --micro-batch-size 4 --hash"
want=$(launch local $few --zero-stage 0 | hash_of)
for stage in 0 1 2 3; do
    for sac in none full; do
        out=$(launch hand $few --zero-stage $stage --sac $sac --timeout 30)
        got=$(echo "$out" | hash_of)
        name="ZeRO-$stage, recompute $sac, dp 2 over NCCL"
        if [ -n "$want" ] && [ "$got" = "$want" ] && echo "$out" | grep -q 'equal to the plan'
        then pass "$name: hash $got, plan = run"
        else fail "$name: hash '$got', not '$want'; $(echo "$out" | grep -m 1 error)"; fi
    done
done
for by in torchrun mpirun srun threads; do
    if [ $by != threads ] && ! command -v $by > /dev/null; then echo "     no $by here"; continue; fi
    got=$(launch $by $few --zero-stage 3 --timeout 30 | tee $logs/$by.log | hash_of)
    if [ "$got" = "$want" ]; then pass "$by: the same hash"
    else fail "$by: hash '$got'; $(grep -m 1 error $logs/$by.log)"; fi
done

loss() { grep -E '^step 4/4' | sed 's/.*loss \([0-9.]*\).*/\1/'; }
one=$($T --device cuda --gpus 1 --data LICENSE --steps 4 | loss)
for cut in "--tp 2" "--tp 2 --sp" "--pp 2 --micro-batch-size 2 --micro-batches 4" \
    "--pp 2 --micro-batch-size 2 --micro-batches 4 --schedule zb-h1" \
    "--pp 2 --micro-batch-size 2 --micro-batches 4 --pp-overlap 1"; do
    got=$(launch hand --steps 4 $cut --timeout 30 | loss)
    if [ -n "$one" ] && [ "$got" = "$one" ]; then pass "$cut over NCCL: loss $got as on one GPU"
    else fail "$cut over NCCL: loss '$got', one GPU $one"; fi
done

thread_stacks() { # of a process that hangs, for whoever mends it
    command -v cuda-gdb > /dev/null || return
    timeout 20 cuda-gdb -p "$1" -batch -ex "thread apply all bt 12" 2> /dev/null |
        grep -E '^#|^Thread' | cut -c1-140 | head -n 60
}

# Ranks that are killed, stopped, or ask for something else: the other ends within the time-out.
long="--dp 2 --zero-stage 3 --steps 100000 --timeout 8"
for signal in KILL STOP; do
    by_hand 1 $long > $logs/rank1.log 2>&1 & other=$!
    by_hand 0 $long > $logs/rank0.log 2>&1 & mine=$!
    sleep 6
    kill -$signal $other
    begin=$SECONDS status=0
    (sleep 25; thread_stacks $mine > $logs/stacks.log; kill -9 $mine) 2> /dev/null & watch=$!
    wait $mine || status=$?
    kill $watch 2> /dev/null
    line=$(grep -m 1 '^error' $logs/rank0.log)
    if ((status == 1)) && [ -n "$line" ]; then
        pass "SIG$signal of rank 1: rank 0 ends after $((SECONDS - begin)) s: $line"
    else fail "SIG$signal of rank 1: status $status after $((SECONDS - begin)) s: $line"; fi
    kill -9 $other 2> /dev/null
    wait $other 2> /dev/null
done
by_hand 1 --dp 2 --steps 3 --seq-len 64 --timeout 8 > $logs/rank1.log 2>&1 & other=$!
(by_hand 0 --dp 2 --steps 3 --seq-len 128 --timeout 8) > $logs/rank0.log 2>&1
status=$?
wait $other
other=$?
if ((status == 1 && other == 1)); then pass "other sizes: $(grep -m 1 '^error' $logs/rank0.log)"
else fail "other sizes: status $status and $other"; fi

M=build/gpu/nccl_mismatch
[ -x $M ] || make $M > /dev/null
for what in late size alone; do
    begin=$SECONDS status=0
    line=$(timeout -k 5 60 $M $what 2>&1) || status=$?
    if [ $what = late ] && ((status == 0)); then pass "a rank that is late is waited for"
    elif [ $what != late ] && ((status == 1)) && [[ $line == *all-gather*everyone* ]]; then
        pass "a rank that is not with the others ($what): after $((SECONDS - begin)) s: $line"
    else fail "nccl_mismatch $what: status $status after $((SECONDS - begin)) s: $line"; fi
done

if [ "${1:-}" = bench ]; then
    head -c 3000000 /dev/urandom > build/bench_tokens.bin
    L1B="--hidden 2048 --layers 16 --heads 32 --kv-heads 8 --intermediate 8192 --vocab 128256
        --tie-embeddings --micro-batch-size 4 --seq-len 4096 --dtype bf16"
    speed() { # NAME: the median of the steps after the third, a GPU, and the peak
        sed -n 's/.*| \([0-9]*\) tok\/s | MFU \([0-9.?%]*\) | peak \([0-9.]*\) MiB.*/\1 \2 \3/p' |
            tail -n +4 | sort -n | awk -v n="$1" -v g="$2" '{r[NR] = $1; m[NR] = $2; p = $3}
                END {k = int((NR + 1) / 2)
                     printf "%s: %d tok/s a GPU, MFU %s, peak %d MiB\n", n, r[k] / g, m[k], p}'
    }
    $T --device cuda --data build/bench_tokens.bin --gpus 1 $L1B --steps 10 2>&1 | speed "one GPU" 1
    for stage in 1 2 3; do
        for run in nccl local; do
            $T --device cuda --data build/bench_tokens.bin --gpus 2 --transport $run --dp 2 $L1B \
                --steps 10 --zero-stage $stage 2>&1 | speed "ZeRO-$stage, dp 2, $run" 2
        done
    done
    $T --device cuda --data build/bench_tokens.bin --gpus 2 --transport nccl --dp 2 $L1B \
        --steps 10 --zero-stage 3 --sac selective 2>&1 | speed "ZeRO-3, dp 2, nccl, selective" 2
    for stage in 1 2 3; do # the device's own times
        line=$($T --device cuda --data build/bench_tokens.bin --gpus 2 --transport nccl --dp 2 $L1B \
            --steps 4 --zero-stage $stage --trace $logs/trace$stage.json 2>&1 | grep '^overlap')
        share=$(echo "$line" | sed -n 's/.* \([0-9.]*\)% lie under.*/\1/p')
        if awk -v s="${share:-0}" 'BEGIN {exit !(s >= 80)}'; then pass "ZeRO-$stage, 1b: $line"
        elif [ $stage = 3 ]; then fail "ZeRO-3, 1b: $line"
        else echo "     ZeRO-$stage, 1b: $line"; fi
    done
    if python3 -c 'import torch, transformers' 2> /dev/null; then
        torchrun --nproc-per-node 2 --master-port 29620 tests/gpu/torch_peer.py fsdp 2>&1 | tail -n 1
    fi
fi
echo "$passed passed, $failed failed"
((failed == 0))
