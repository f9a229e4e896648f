#!/bin/sh
# Speed and peak memory of the trainer for every ZeRO stage and recompute policy, on this machine.
#
# usage: tools/bench.sh TRAINER [FLAGS...]     flags are added to the model and batch below
set -u

trainer=${1:-build/train_llama}
[ $# -gt 0 ] && shift
dir=$(mktemp -d "${TMPDIR:-/tmp}/ft_bench.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM

echo "4 ranks, 4 layers, hidden 128, 4 x 128 tokens a rank, 6 steps, the median step counts"
printf '%-8s %-12s %12s %14s\n' stage recompute "tokens/s" "peak MiB/rank"
for stage in 0 1 2 3; do
    for sac in none selective full; do
        "$trainer" --data ./*.h --dp 4 --zero-stage $stage --sac $sac --micro-batch-size 4 \
            --steps 6 --log "$dir/log" "$@" >"$dir/out" || exit 1
        rate=$(sed 's/.*"tokens_per_s": *\([0-9.e+]*\).*/\1/' "$dir/log" | sort -g | sed -n 4p)
        peak=$(tail -n 1 "$dir/log" | sed 's/.*"peak_bytes": *\([0-9]*\).*/\1/')
        awk -v stage=$stage -v sac=$sac -v rate="$rate" -v peak="$peak" 'BEGIN {
            printf "%-8s %-12s %12.0f %14.2f\n", stage, sac, rate, peak / 1048576 }'
    done
done
