#!/usr/bin/env bash
# nccl.sh [bench]: two GPUs of one host over NCCL, by each launcher that is here, beside the local
# transport; ranks that die, hang or disagree; with `bench` also speed beside PyTorch FSDP2.
set -uo pipefail
cd "$(dirname "$0")/../.."
T=build/train_llama_cuda
M=build/gpu/nccl_mismatch
mkdir -p build/gpu
make $T $M ${GPU_ARCH:+GPU_ARCH="$GPU_ARCH"} > build/gpu/nccl_build.log 2>&1 ||
    { tail build/gpu/nccl_build.log; exit 1; }
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

# Random meshes, each rank late at random: no hang, and the loss of one GPU.
RANDOM=7 same=0 runs=${RANDOM_RUNS:-10}
for ((i = 0; i < runs; i++)); do
    m=$((1 << RANDOM % 3)) schedule=1f1b
    case $((RANDOM % 3)) in
    0) mesh="--dp 2 --micro-batch-size $((4 / m)) --micro-batches $m" ;;
    1) mesh="--tp 2 --micro-batch-size $((8 / m)) --micro-batches $m"
       ((RANDOM % 2)) && mesh+=" --sp" ;;
    2) ((RANDOM % 2 && m > 1)) && schedule=zb-h1
       mesh="--pp 2 --micro-batch-size $((8 / m)) --micro-batches $m --pp-overlap $((RANDOM % 2))" ;;
    esac
    policies=(none selective full)
    mesh+=" --schedule $schedule --zero-stage $((RANDOM % 4)) --sac ${policies[RANDOM % 3]}"
    export FT_DELAY_US=$((RANDOM % 3000))
    got=$(launch hand --steps 4 $mesh --timeout 30 | loss)
    unset FT_DELAY_US
    if [ -n "$one" ] && [ "$got" = "$one" ]; then same=$((same + 1))
    else echo "     loss '$got' with $mesh: $(grep -m 1 error $logs/rank1.log)"; fi
done
if ((same == runs)); then pass "$runs random meshes with delays: loss $one"
else fail "random meshes with delays: $same of $runs"; fi

# SIGTERM of one process: all stop after the same step and save; any other transport resumes.
kept="--dp 2 --zero-stage 3 --checkpoint-dir $logs/checkpoints"
rm -rf $logs/checkpoints
by_hand 1 $kept --steps 100000 --timeout 30 > $logs/rank1.log 2>&1 & other=$!
by_hand 0 $kept --steps 100000 --timeout 30 > $logs/rank0.log 2>&1 & mine=$!
sleep 6
kill -TERM $other
(sleep 45; kill -9 $mine $other) > /dev/null 2>&1 & watch=$!
wait $mine; status=$?
wait $other; status+=" $?"
kill $watch 2> /dev/null
n=$(sed -n 's/^stopped by SIGTERM after step \([0-9]*\) of .*/\1/p' $logs/rank0.log)
line=$(launch local $kept --steps $((${n:-0} + 2)) --resume auto | grep "^step $((${n:-0} + 2))/")
if [ "$status" = "0 0" ] && [ -n "$n" ] && [ -n "$line" ]
then pass "SIGTERM of rank 1: both save step $n; on the local transport it goes on: ${line%%| lr*}"
elif grep -q 'built without checkpoints' $logs/rank0.log; then echo "     no cJSON, xxHash: no checkpoints"
else fail "SIGTERM of rank 1: status $status, step '$n': $(tail -n 2 $logs/rank0.log)"; fi

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
    (sleep 25; thread_stacks $mine > $logs/stacks.log; kill -9 $mine) > /dev/null 2>&1 & watch=$!
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

# Ranks, as threads and as processes, that do not ask for the same.
one_of_two() {
    RANK=$1 WORLD_SIZE=2 LOCAL_RANK=$1 LOCAL_WORLD_SIZE=2 NCCL_COMM_ID=127.0.0.1:29612 \
        timeout -k 5 60 $M $2 2>&1
}
for what in late again size dtype kind turn less more alone; do
    for how in threads processes; do
        begin=$SECONDS status=0 peer=0
        if [ $how = threads ]; then
            line=$(timeout -k 5 60 $M $what 2>&1) || status=$?
        else
            one_of_two 1 $what > $logs/rank1.log & other=$!
            line=$(one_of_two 0 $what) || status=$?
            wait $other || peer=$?
            [[ $what == less || $what == more ]] && line=$(cat $logs/rank1.log) # the receiver knows
        fi
        took="$((SECONDS - begin)) s: $line"
        case $what in
        late | again) good="0 $peer" ;;
        alone) good="1 $peer" ;;
        less | more) good="$status 1"; [ $how = threads ] && good="1 0" ;; # the sender may be through
        *) good="1 $( [ $how = threads ] && echo 0 || echo 1)" ;;
        esac
        if [ "$status $peer" = "$good" ] && case $what in
            late | again) [ -z "$line" ] ;;
            alone) [[ $line == *all-gather*everyone* ]] ;;
            turn) [[ $line == *disagree*everyone* || $line == *all-gather*everyone* ]] ;;
            *) [[ $line == *disagree*everyone* ]] ;;
            esac
        then pass "nccl_mismatch $what, $how: $took"
        else fail "nccl_mismatch $what, $how: status $status $peer, $took"; fi
    done
done

if [ "${1:-}" = bench ]; then
    . tests/gpu/speed.sh
    STEPS=10
    L1B="$shape_1b --micro-batch-size 4 --seq-len 4096"
    timed "one GPU" 1 $L1B
    for stage in 1 2 3; do
        for transport in nccl local; do
            timed "ZeRO-$stage, dp 2, $transport" 2 --transport $transport --dp 2 $L1B --zero-stage $stage
        done
    done
    timed "ZeRO-3, dp 2, nccl, selective" 2 --transport nccl --dp 2 $L1B --zero-stage 3 --sac selective
    for overlap in 0 1; do
        timed "pp 2, nccl, 8 micro-batches of 1, --pp-overlap $overlap" 2 --transport nccl --pp 2 \
            $shape_1b --seq-len 4096 --micro-batch-size 1 --micro-batches 8 --pp-overlap $overlap
    done
    for stage in 1 2 3; do # the device's own times
        line=$($T --device cuda --data $tokens --gpus 2 --transport nccl --dp 2 $L1B --dtype bf16 \
            --steps 4 --zero-stage $stage --trace $logs/trace$stage.json 2>&1 | grep '^overlap')
        share=$(echo "$line" | sed -n 's/.* \([0-9.]*\)% lie under.*/\1/p')
        if awk -v s="${share:-0}" 'BEGIN {exit !(s >= 80)}'; then pass "ZeRO-$stage, 1b: $line"
        elif [ $stage = 3 ]; then fail "ZeRO-3, 1b: $line"
        else echo "     ZeRO-$stage, 1b: $line"; fi
    done
    if has_torch; then
        for masters in "" --masters; do
            torchrun --nproc-per-node 2 --master-port 29620 tests/gpu/torch_peer.py fsdp 1b $masters 2>&1 |
                tail -n 1
        done
    fi
fi
echo "$passed passed, $failed failed"
((failed == 0))
