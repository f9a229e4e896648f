#!/bin/sh
# The planner against the trainer: what it says of a rank is what a plan of all ranks says; what it
# lists as fitting fits; models have their published number of weights; big ones are planned at once.
#
# usage: tests/test_memplan.sh      from the project's root; builds build/memplan, build/train_llama
# Last line: "N passed, N failed".
. "$(dirname "$0")/shell.sh"

built build/memplan build/train_llama
plan() { build/memplan "$@" >"$dir/out" 2>"$dir/err"; }

# Lists of words, on purpose.
# shellcheck disable=SC2086
{
    # A rank of each stage stands for all: the trainer plans every one.
    small="--hidden 48 --heads 4 --kv-heads 2 --intermediate 64 --seq-len 16 --micro-batch-size 2"
    for layout in "" "--dp 3 --zero-stage 2 --micro-batches 2" "--tp 2 --sp --vocab 131" \
        "--pp 3 --layers 7 --micro-batches 4 --sac selective" \
        "--dp 2 --tp 2 --pp 2 --zero-stage 3 --micro-batches 3 --sac full --vocab 131" \
        "--dp 4 --shard-ranks 2 --zero-stage 3 --dtype bf16 --tie-embeddings --pp 2" \
        "--pp 2 --virtual-stages 2 --schedule interleaved --layers 8 --micro-batches 4" \
        "--pp 4 --schedule zb-h1 --micro-batches 5 --zero-stage 1 --dp 2"; do
        plan $small $layout --json
        build/train_llama $small $layout --device meta --memory-json "$dir/json" >/dev/null
        check "ranks of a stage are alike: $layout" "files differ" cmp -s "$dir/out" "$dir/json"
    done

    while read -r model weights; do
        plan --model "$model" --seq-len 16 --micro-batch-size 1
        check "$model has $weights weights" "$(cat "$dir/err" "$dir/out" | head -n 1)" \
            grep -q ": $weights weights" "$dir/out"
    done <<EOF
llama-3.2-1b 1,235,814,400
llama-3.2-3b 3,212,749,824
llama-3-8b 8,030,261,248
llama-3-70b 70,553,706,496
llama-3.1-405b 405,853,388,800
llama-2-7b 6,738,415,616
qwen2.5-0.5b 494,032,768
qwen2.5-7b 7,615,616,512
qwen3-8b 8,190,735,360
EOF

    # 512 ranks, in under 5 seconds.
    for layout in "--dp 512 --zero-stage 3 --sac full" \
        "--dp 8 --tp 8 --pp 8 --sp --zero-stage 1 --sac selective --micro-batches 32" \
        "--dp 64 --tp 8 --zero-stage 3 --micro-batches 8"; do
        begin=$(date +%s)
        plan --model llama-3-70b --seq-len 8192 --micro-batch-size 1 $layout
        status=$?
        took=$(($(date +%s) - begin))
        check "70 billion weights on 512 ranks: $layout" "status $status after $took s" \
            [ $status = 0 -a $took -lt 5 ]
    done

    # A model's config.json, and a flag that goes before it.
    cat >"$dir/config.json" <<'EOF'
{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896,
 "intermediate_size": 4864, "num_attention_heads": 14, "num_hidden_layers": 24,
 "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
 "tie_word_embeddings": true, "vocab_size": 151936, "hidden_act": "silu",
 "max_position_embeddings": 32768, "use_sliding_window": false}
EOF
    if plan --model "$dir/config.json" --seq-len 64 --json; then
        cp "$dir/out" "$dir/from_file"
        plan --model qwen2.5-0.5b --seq-len 64 --json
        check "a config.json is the preset" "plans differ" cmp -s "$dir/out" "$dir/from_file"
    elif grep -q "needs\? a build with cJSON\|need a build with cJSON" "$dir/err"; then
        printf 'skip a config.json: no cJSON here\n'
    else
        fail "a config.json" "$(cat "$dir/err")"
    fi
    plan --model llama-3-8b --layers 2 --seq-len 64
    check "a flag goes before the model" "$(cat "$dir/err")" grep -q "2 layers, hidden 4096" \
        "$dir/out"

    # What is explained adds up, and is what the two stages' plans say.
    layout="--model llama-3.2-1b --dp 4 --seq-len 512 --micro-batch-size 1 --sac full"
    plan $layout --explain
    sum=$(tr -d , <"$dir/out" | awk '/^  peak of ZeRO-2/ { a = $NF } /^  sharding/ { s = $NF }
        /^  the transient/ { t = $NF } /^  all else/ { e = $NF } /^  peak of ZeRO-3/ { b = $NF }
        END { print (a && b && a + s + t + e == b) ? a " " b : "no" }')
    two=$(build/memplan $layout --zero-stage 2 --json | sed 's/.*"rank":0,"peak_bytes":\([0-9]*\).*/\1/')
    three=$(build/memplan $layout --zero-stage 3 --json |
        sed 's/.*"rank":0,"peak_bytes":\([0-9]*\).*/\1/')
    check "--explain adds up" "'$sum', not '$two $three'" [ "$sum" = "$two $three" ]

    # Every row of a sweep fits and is what a plan of it says; cheapest first.
    plan --model llama-3.2-1b --sweep --gpus 4 --gpu-mem 24GiB --seq-len 2048 --dp 4 \
        --micro-batch-size 2 --micro-batches 2
    awk '/s\/step/ { on = 1; next } on && $1 + 0 > 0 && NF == 11' "$dir/out" >"$dir/rows"
    rows=$(wc -l <"$dir/rows")
    check "a sweep finds layouts" "$(cat "$dir/err")" [ "$rows" -ge 5 ]
    check "a sweep is sorted" "it is not" sort -c -n -k 1,1 "$dir/rows"
    n=0
    while read -r seconds dp tp pp stage sac b x m gib sent; do
        n=$((n + 1))
        [ $((n % 4)) = 1 ] || continue
        sp=
        [ "$tp" -gt 1 ] && sp=--sp
        build/memplan --model llama-3.2-1b --seq-len 2048 --dp "$dp" --tp "$tp" --pp "$pp" $sp \
            --zero-stage "$stage" --sac "$sac" --micro-batch-size "$b" --micro-batches "$m" --json |
            tr '{' '\n' | sed -n 's/.*"peak_bytes":\([0-9]*\).*/\1/p' | sort -n | tail -n 1 |
            awk '{ printf "%.2f\n", $1 / 1073741824 }' >"$dir/peak"
        check "a row of the sweep: $seconds s, $dp $tp $pp $stage $sac $b $x $m, $sent bytes" \
            "$(cat "$dir/peak") GiB" grep -q -x -F "$gib" "$dir/peak"
        check "it fits" "$gib" awk "BEGIN { exit !($gib <= 24) }"
    done <"$dir/rows"
    plan --model llama-3-70b --sweep --gpus 2 --gpu-mem 8GiB --seq-len 64 --micro-batch-size 1
    check "a sweep without a fit says so" "$(cat "$dir/out")" grep -q "fits" "$dir/err"

    for wrong in "--model no-such" "--gpu-mem x --sweep" "--gpus 0 --sweep" "--no-such-flag" \
        "--gpu-tflops 0 --sweep" "--heads 3 --hidden 64x"; do
        plan $wrong
        status=$?
        check "refuses $wrong" "status $status" [ $status = 2 -a -s "$dir/err" ]
    done
    plan --explain
    check "--explain needs dp" "$(cat "$dir/err")" grep -q "dp 2" "$dir/err"
    plan --help
    check "--help names the models" "it does not" grep -q "qwen2.5-7b" "$dir/out"
}

finish
