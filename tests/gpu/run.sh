#!/usr/bin/env bash
# run.sh: builds for this machine's GPUs, tests, and prints a short table last.
#
#   tests/gpu/run.sh [quick|full]     quick (default): every test once. full: the larger cases, and
#                                     compute-sanitizer where it is here.
#
# Needs the CUDA Toolkit and one GPU. cmocka, cJSON and xxHash are needed for the tests that the CPU
# has too; without them these are named and not run. Exit status 1 if anything failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
mode=${1:-quick}
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

cpu_tests="test_golden test_3d test_split test_tp test_llama"
for name in $cpu_tests; do
    bash tests/gpu/build_test.sh "$name" build/femtotron_kernels.o > "$logs/build_$name.log" 2>&1 &
done
wait

echo "==== kernels"
counted test_kernels build/gpu/test_kernels
counted test_attention build/gpu/test_attention
[ "$mode" = full ] && counted test_kernels_large build/gpu/test_kernels --large

echo "==== the tests of the CPU on the GPU"
for name in $cpu_tests; do
    if [ -x "build/gpu/$name" ]; then counted "$name" "build/gpu/$name"
    else note "     $name not built: $(grep -m 1 -E 'error|cannot find' "$logs/build_$name.log")"; fi
done

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

# The 48 cells with 8 ranks on one GPU; a smaller card runs those that fit.
cells=$logs/cells.log
build/memory_tables_cuda --device cuda --csv --cells $( [ "$mode" = full ] && echo 1-48 || echo 1-8) \
    > "$cells" 2> "$cells.err"
status=$?
ran=$(grep -cE '^[12],.*[0-9]$' "$cells")
if ((status == 0 && ran > 0)); then pass "plan = run in $ran cells of the memory tables"
else fail "cells of the memory tables: $(tail -n 1 "$cells.err")"; fi

if [ "$mode" = full ] && command -v compute-sanitizer > /dev/null; then
    echo "==== compute-sanitizer"
    for tool in memcheck racecheck; do
        if compute-sanitizer --tool $tool --error-exitcode 1 build/gpu/test_kernels --short \
            > "$logs/$tool.log" 2>&1; then pass "compute-sanitizer $tool"
        else fail "compute-sanitizer $tool: $(grep -m 1 '=====.*rror\|azard' "$logs/$tool.log")"; fi
    done
fi

echo
printf '%s\n' "${table[@]}"
echo "$passed passed, $failed failed"
((failed == 0))
