#!/usr/bin/env bash
# run.sh: builds for this machine's GPUs, tests, and prints a short table last.
#
#   tests/gpu/run.sh [quick|full [PART...]]   quick (default): every test once. full: the larger
#                                cases, and compute-sanitizer where it is here.
#                                PART: kernels, cpu, trainer, sanitizers; default all of them
#
# Needs the CUDA Toolkit and one GPU. cmocka, cJSON and xxHash are needed for the tests that the CPU
# has too; without them these are named and not run. Exit status 1 if anything failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
mode=${1:-quick}
parts=" ${*:2} "
part() { [ "$parts" = "  " ] || [[ $parts == *" $1 "* ]]; }
logs=build/gpu/logs
mkdir -p "$logs"
passed=0 failed=0 table=()

note() { table+=("$1"); printf '%s\n' "$1"; }
pass() { passed=$((passed + 1)); note "ok   $1"; }
fail() { failed=$((failed + 1)); note "FAIL $1"; }

# counted NAME COMMAND...: a program whose last line is `N passed, N failed`, or cmocka's.
counted() {
    local name=$1 log=$logs/$1.log start=$SECONDS status=0 line p f
    shift
    timeout -k 5 "${TEST_TIMEOUT:-240}" "$@" > "$log" 2>&1 || status=$?
    p=$(grep -cE '^\[       OK \]' "$log") f=$(grep -cE '^\[  FAILED  \] [a-z0-9_]+$' "$log")
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -n 1)
    if [ -n "$line" ]; then
        p=$(echo "$line" | cut -d' ' -f1)
        f=$(echo "$line" | cut -d' ' -f3)
    fi
    if ((status != 0 && f == 0)) || ((p + f == 0)); then f=$((f + 1)); fi
    passed=$((passed + p)) failed=$((failed + f))
    note "$( ((f)) && echo FAIL || echo 'ok  ') $name: $p passed, $f failed, $((SECONDS - start)) s"
    if ((f)); then grep -E 'FAIL|rror' "$log" | head -n 8; tail -n 3 "$log"; fi
}

trainer_parts() {
    echo "==== the trainer"
    train() { build/train_llama_cuda --device cuda --data LICENSE "$@" 2>&1; }

    # Equal hashes: stages x recomputation at dp 8 on one GPU, and twice the same.
    hashes= planned=0 runs=0
    for stage in 0 1 2 3; do
        for sac in none selective full; do
            out=$(train --gpus 1 --dp 8 --zero-stage $stage --sac $sac --dtype bf16 --steps 3 \
                --micro-batch-size 1 --hash)
            runs=$((runs + 1))
            hashes+="$(echo "$out" | grep '^hash') "
            if echo "$out" | grep -q 'equal to the plan'; then planned=$((planned + 1))
            else echo "$out" > "$logs/train_${stage}_$sac.log"; fi
        done
    done
    hashes+=$(train --gpus 1 --dp 8 --zero-stage 3 --dtype bf16 --steps 3 --micro-batch-size 1 --hash |
        grep '^hash')
    distinct=$(echo "$hashes" | tr ' ' '\n' | grep -E '^[0-9a-f]{16}$' | sort | uniq -c)
    if [ "$(echo "$distinct" | awk '{print $1}')" = 13 ]; then pass "13 runs at dp 8, one hash"
    else fail "hashes at dp 8 differ: $distinct"; fi
    if ((planned == runs)); then pass "plan = run, to the byte, in $runs runs"
    else fail "plan = run in $planned of $runs runs"; fi

    # Layouts: the last loss in fp32.
    loss() { train "$@" --steps 5 | grep -E '^step 5/5' | sed 's/.*loss \([0-9.]*\).*/\1/'; }
    one=$(loss --micro-batch-size 8)
    for layout in "--dp 2 --tp 2 --pp 2 --micro-batch-size 2 --micro-batches 2 --zero-stage 3 --sp" \
        "--dp 4 --pp 2 --micro-batch-size 1 --micro-batches 2 --zero-stage 2 --schedule zb-h1" \
        "--tp 4 --micro-batch-size 8 --sac full" \
        "--pp 2 --micro-batch-size 2 --micro-batches 4 --schedule interleaved --virtual-stages 2"; do
        other=$(loss --gpus 1 $layout)
        if [ -n "$one" ] && [ "$one" = "$other" ]; then pass "loss $one with $layout"
        else fail "loss $one on one rank, $other with $layout"; fi
    done

    # Random meshes, with delays between collectives: no hang, and the loss of one rank.
    RANDOM=1 same=0 ran=0
    for i in $(seq $( [ "$mode" = full ] && echo 40 || echo 6)); do
        dp=$((1 << RANDOM % 3)) tp=$((1 << RANDOM % 3)) pp=$((1 << RANDOM % 3))
        ((dp * tp * pp > 8)) && continue
        m=$((1 << RANDOM % 2)) schedule=1f1b
        ((8 % (dp * m))) && m=1
        ((RANDOM % 2 && m >= pp)) && schedule=zb-h1
        policies=(none selective full)
        recompute=${policies[RANDOM % 3]}
        mesh="--dp $dp --tp $tp --pp $pp --micro-batch-size $((8 / dp / m)) --micro-batches $m"
        mesh+=" --zero-stage $((RANDOM % 4)) --sac $recompute --schedule $schedule"
        ran=$((ran + 1))
        other=$(FT_DELAY_US=$((RANDOM % 3000)) timeout 60 build/train_llama_cuda --device cuda --gpus 1 \
            --data LICENSE --steps 5 $mesh 2>&1 | grep -E '^step 5/5' | sed 's/.*loss \([0-9.]*\).*/\1/')
        if [ -n "$one" ] && [ "$one" = "$other" ]; then same=$((same + 1))
        else note "     loss $one on one rank, $other with $mesh"; fi
    done
    if ((same == ran && ran > 0)); then pass "$ran random meshes with delays: loss $one"
    else fail "random meshes with delays: $same of $ran"; fi

    # A table of GEMM algorithms: written once, read later, the same bits.
    rm -f build/gpu/gemm_table
    tuned() { train --gemm-tune build/gpu/gemm_table --dtype bf16 --hidden 512 --steps 3 --hash |
        grep '^hash'; }
    first=$(tuned)
    lines=$(wc -l < build/gpu/gemm_table)
    second=$(tuned)
    if [ -n "$first" ] && [ "$first" = "$second" ] && ((lines > 1)) &&
        [ "$(wc -l < build/gpu/gemm_table)" = "$lines" ]; then pass "--gemm-tune: $lines lines, $first twice"
    else fail "--gemm-tune: '$first', then '$second', $lines lines"; fi

    # The 48 cells with 8 ranks on one GPU; a smaller card runs those that fit.
    cells=$logs/cells.log
    build/memory_tables_cuda --device cuda --csv --cells "${CELLS:-$( [ "$mode" = full ] && echo 1-48 || echo 1-8)}" \
        > "$cells" 2> "$cells.err"
    status=$?
    ran=$(grep -cE '^[12],.*[0-9]$' "$cells")
    if ((status == 0 && ran > 0)); then pass "plan = run in $ran cells of the memory tables"
    else fail "cells of the memory tables: $(tail -n 1 "$cells.err")"; fi
}

memory_in_use() {
    # What the GPU has in use beside what the ranks reserved: a small run's libraries against a large's.
    in_use() { # FLAGS: bytes of the ranks, bytes of the rest
        train --gpus 1 --steps 2 --dtype bf16 "$@" |
            sed -n 's/.* in use: \([0-9,]*\) of its ranks, \([0-9,]*\) of CUDA.*/\1 \2/p' | tr -d ,
    }
    read -r small_ranks small_rest <<< "$(in_use)"
    read -r ranks rest <<< "$(in_use --hidden 2048 --layers 16 --heads 32 --kv-heads 8 \
        --intermediate 8192 --vocab 128256 --tie-embeddings --micro-batch-size 2 --seq-len 512)"
    if [ -n "${rest:-}" ] && ((rest - small_rest < ranks / 20 + (64 << 20) &&
        small_rest - rest < ranks / 20 + (64 << 20)))
    then pass "GPU memory: $ranks bytes of the ranks, the rest $small_rest in a small run, $rest here"
    else fail "GPU memory: ranks ${ranks:-?}, the rest ${small_rest:-?} in a small run, ${rest:-?} here"; fi
}

arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
if [ -z "$arch" ]; then
    echo "error: nvidia-smi shows no GPU; these tests need one" >&2
    exit 1
fi
[ "$arch" = 90 ] && arch=90a
export GPU_ARCH="-gencode arch=compute_$arch,code=sm_$arch"
jobs=$(nproc)

echo "==== building for sm_$arch"
make -j"$jobs" build/train_llama_cuda build/memory_tables_cuda build/gpu/test_kernels \
    build/gpu/test_attention GPU_ARCH="$GPU_ARCH" \
    > "$logs/build.log" 2>&1 || { tail -n 30 "$logs/build.log"; echo "0 passed, 1 failed"; exit 1; }

cpu_tests="test_golden test_3d test_split test_tp test_llama test_documents"
for name in $(part cpu && echo "$cpu_tests"); do
    bash tests/gpu/build_test.sh "$name" build/femtotron_kernels.o > "$logs/build_$name.log" 2>&1 &
done
wait

sanitizing= # NAME:PID of what runs beside the tests
if [ "$mode" = full ] && part sanitizers && command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck; do
        # The order of things within cuBLASLt is not ours to check, and some of it stops racecheck.
        only= gemms=
        if [ $tool = racecheck ]; then only="--kernel-name kns=ftk__" gemms=" --no-bf16-gemm"; fi
        for program in "test_kernels --short$gemms" "test_attention --few"; do
            name=${tool}_${program%% *}
            timeout -k 5 "${SANITIZER_TIMEOUT:-480}" compute-sanitizer --tool $tool \
                --error-exitcode 1 $only build/gpu/$program \
                > "$logs/$name.log" 2>&1 &
            sanitizing+=" $name:$!"
        done
    done
fi

if part kernels; then
    echo "==== kernels"
    if [ "$mode" = full ]; then counted test_kernels build/gpu/test_kernels --large
    else counted test_kernels build/gpu/test_kernels; fi
    counted test_attention build/gpu/test_attention
fi

part cpu && echo "==== the tests of the CPU on the GPU"
for name in $(part cpu && echo "$cpu_tests"); do
    if [ -x "build/gpu/$name" ]; then counted "$name" "build/gpu/$name"
    else note "     $name not built: $(grep -m 1 -E 'error|cannot find' "$logs/build_$name.log")"; fi
done

part trainer && trainer_parts

for name in $sanitizing; do
    wait "${name##*:}" && status=0 || status=$?
    log=$logs/${name%%:*}.log
    if ((status == 0)); then pass "compute-sanitizer ${name%%:*}: $(tail -n 1 "$log")"
    else fail "compute-sanitizer ${name%%:*} (status $status): $(grep -m 1 '=====.*rror\|azard' "$log")"; fi
done

part trainer && memory_in_use

echo
printf '%s\n' "${table[@]}"
echo "$passed passed, $failed failed"
((failed == 0))
