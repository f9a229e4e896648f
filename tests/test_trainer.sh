#!/bin/sh
# The trainer as its users meet it: what it refuses and in which words, what it prints, the files it
# writes, that the plan is the run, and that weights do not depend on the layout.
#
# usage: tests/test_trainer.sh      tests $FT_TRAINER, default build/train_llama
# Last line: "N passed, N failed".
. "$(dirname "$0")/shell.sh"

counting 250 >"$dir/data.txt" # 12 kB
: >"$dir/empty"
printf 'short' >"$dir/short"
printf 'abc\376def' >"$dir/high"
cat "$dir/data.txt" >>"$dir/high"

# A small model: the arguments of every test below are added to it.
small="--hidden 32 --layers 2 --heads 4 --kv-heads 2 --seq-len 32"

# ------------------------------------------------------------------------------------- bad input

# refuse WORDS ARGUMENTS...: a non-zero exit that is not a crash, nothing but one line on standard
# error, which begins with "error:" and holds WORDS.
refuse() {
    words=$1
    shift
    run "$@"
    status=$?
    lines=$(wc -l <"$dir/err")
    name="refuses $(echo "$*" | sed "s|$dir/||g")"
    if [ $status = 0 ]; then fail "$name" "exit status 0"
    elif [ $status -ge 124 ]; then fail "$name" "exit status $status"
    elif [ "$lines" -ne 1 ]; then fail "$name" "$lines lines on standard error"
    elif ! grep -q "^error: " "$dir/err"; then fail "$name" "no error: line"
    elif ! grep -qi -e "$words" "$dir/err"; then fail "$name" "does not say: $words"
    else pass "$name"
    fi
}

# expect NAME PATTERN COUNT: so many lines of standard output match.
expect() {
    n=$(grep -c -E -e "$2" "$dir/out")
    if [ "$n" = "$3" ]; then pass "$1"; else fail "$1" "$n lines match $2, not $3"; fi
}

data="--data $dir/data.txt"
# Lists of words, on purpose.
# shellcheck disable=SC2086
{
    refuse "missing" $small
    refuse "needs a value" $small --data
    refuse "no-such-file" $small --data "$dir/no-such-file"
    refuse "$dir" $small --data "$dir"
    refuse "empty" $small --data "$dir/empty"
    refuse "empty" $small --data "$dir/data.txt" "$dir/empty"
    refuse "short" $small --data "$dir/short"
    refuse "32" $small --data "$dir/short"
    refuse "254" $small --vocab 200 --data "$dir/high"
    refuse "data.txt" $small --vocab 64 $data
    refuse "kv" --heads 4 --kv-heads 3 $data
    refuse "head" --hidden 130 --heads 4 $data
    refuse "head" --heads 4 --head-dim 7 $data
    refuse "--unknown" $small $data --unknown
    refuse "--unknown" $small $data --unknown 3
    refuse "stray" stray $small $data
    refuse "twice" $small $data --lr 0.1 --lr 0.2
    for flag in --dp --micro-batch-size --micro-batches --seq-len --steps --hidden --layers \
        --heads --kv-heads --head-dim --intermediate --vocab; do
        refuse "$flag 0" $data $flag 0
    done
    for flag in --dp --zero-stage --prefetch --micro-batch-size --micro-batches --seq-len --steps \
        --warmup --seed --hidden --layers --heads --kv-heads --head-dim --intermediate --vocab \
        --sample; do
        refuse "$flag -1" $data $flag -1
        refuse "$flag 99999999999999999999" $data $flag 99999999999999999999
        refuse "$flag 1x" $data $flag 1x
        refuse "$flag 1.5" $data $flag 1.5
        refuse "$flag needs a value" $data $flag
    done
    for flag in --lr --weight-decay --grad-clip; do
        for value in -1 nan inf 1e999 abc 1.0x 0x1p1; do
            refuse "$flag $value" $data $flag $value
        done
        refuse "$flag needs a value" $data $flag
    done
    refuse "--dp" $data --dp ""
    refuse "--lr" $data --lr ""
    refuse "--log" $data --log ""
    refuse "zero-stage 4" $small $data --zero-stage 4
    refuse "cpu|meta" $small $data --device gpu
    refuse "fp32|bf16" $small $data --dtype fp16
    refuse "0|1" $small $data --reduce-overlap 2
    refuse "0|1" $small $data --tie-embeddings 2
    refuse "none|selective" $small $data --sac some
    for value in 0 -5 99999999999999999999 12XB 99999999999GiB x ""; do
        refuse "budget" $small $data --sac "budget=$value"
    done
    refuse "byte" $small $data --sac budget=1KiB
    for value in 0 -5 99999999999999999999 12XB 99999999999GiB x ""; do
        refuse "memory-limit" $small $data --memory-limit "$value"
    done
    refuse "arena" $small $data --allocator some
    refuse "needs a value" $small $data --sac
    refuse "too large" $data --micro-batch-size 16777216 --seq-len 16777216
    refuse "too large" $data --micro-batch-size 16777216 --micro-batches 65536 --seq-len 8
    refuse "nowhere" $small $data --log "$dir/nowhere/log"
    refuse "nowhere" $small $data --memory-json "$dir/nowhere/memory"
}

# ------------------------------------------------------------------------------------------ help

if run --help && [ ! -s "$dir/err" ]; then pass "--help succeeds"; else fail "--help" "failed"; fi
for flag in --device --dp --zero-stage --sac --prefetch --reduce-overlap --micro-batch-size \
    --micro-batches --seq-len --steps --lr --warmup --weight-decay --grad-clip --dtype --seed \
    --data --hidden --layers --heads --kv-heads --head-dim --intermediate --vocab --tie-embeddings \
    --model --init-from --export --export-dtype --export-shard-bytes --log --tensorboard \
    --memory-json --sample --hash --config --print-config --help; do
    if grep -q -e "^$flag\\( \\|$\\)" "$dir/out"; then pass "--help has $flag"
    else fail "--help" "no $flag"; fi
done

# ------------------------------------------------------------------- models of Hugging Face, in, out

# shellcheck disable=SC2086
{
    model="--model tiny --seq-len 32 --micro-batch-size 4"
    refuse "not one of tiny" $data --model no-such-model
    refuse "fp32|bf16" $data $model --export "$dir/hf" --export-dtype fp16
    refuse "is a file" $data $model --export "$dir/data.txt"
    refuse "no earlier export" $data $model --export "$dir"
    refuse "mistral has no biases" $data --model mistral-7b --hidden 32 --layers 1 --vocab 256 \
        --intermediate 32 --seq-len 8 --qkv-bias --export "$dir/hf"
    if run $data $model --steps 3 --export "$dir/hf" --hash && [ -s "$dir/hf/config.json" ] &&
        [ -s "$dir/hf/model.safetensors" ]; then pass "exports"
    else fail "exports" "no files"; fi
    hash=$(sed -n 's/^hash //p' "$dir/out")
    if run $data --init-from "$dir/hf" --seq-len 32 --micro-batch-size 4 --steps 1 --hash --lr 0; then
        if [ "$(sed -n 's/^hash //p' "$dir/out")" = "$hash" ]; then pass "starts from an export"
        else fail "starts from an export" "other weights"; fi
        for layout in "--dp 2 --zero-stage 1" "--dp 2 --zero-stage 2 --pp 2" \
            "--tp 2 --sp --zero-stage 3 --dp 2 --allocator arena"; do
            run $data --init-from "$dir/hf" --seq-len 32 --micro-batch-size 4 --steps 1 --lr 0 \
                $layout --export "$dir/again" --export-shard-bytes 200000 --hash
            if grep -q "equal to the plan" "$dir/out" &&
                [ "$(sed -n 's/^hash //p' "$dir/out")" = "$hash" ]; then
                pass "starts from an export: $layout"
            else fail "starts from an export: $layout" "other weights, or not as planned"; fi
        done
        run $data --init-from "$dir/again" --seq-len 32 --micro-batch-size 4 --steps 1 --lr 0 --hash
        if [ "$(sed -n 's/^hash //p' "$dir/out")" = "$hash" ]; then pass "starts from several files"
        else fail "starts from several files" "other weights"; fi
        refuse "contradicts" $data --init-from "$dir/hf" --layers 3
        refuse "other sizes" $data --init-from "$dir/hf" --model qwen2.5-0.5b
        refuse "no-such" $data --init-from "$dir/no-such"
        refuse "config.json" $data --model "$dir/"
        printf '{"model_type": "mistral", "vocab_size": 256, "hidden_size": 32, "rope_theta": 1e4,
"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32,
"sliding_window": 16}' >"$dir/window.json"
        refuse "window of 16" $data --model "$dir/window.json" --seq-len 17
        if run $data --model "$dir/window.json" --seq-len 16 --steps 1; then pass "a window as long"
        else fail "a window as long" "exit status $?"; fi
    elif grep -q "needs a build with cJSON" "$dir/err"; then
        printf 'skip models of Hugging Face: no cJSON here\n'
    else
        fail "starts from an export" "exit status $?"
    fi
}
# ------------------------------------------------------------------------------ options in a file

config=$dir/config.json
write() { printf '%s\n' "$1" >"$config"; }

# Every option of every kind, printed as a file, is what the file then sets.
same_again() { # NAME ARGUMENTS...
    name=$1
    shift
    if ! run "$@" --print-config; then fail "$name" "--print-config fails"; return; fi
    cp "$dir/out" "$config"
    if ! run --config "$config" --print-config; then fail "$name" "the file is refused"
    elif ! cmp -s "$dir/out" "$config"; then fail "$name" "$(diff "$dir/out" "$config")"
    else pass "$name"; fi
}
write '{}'
if run --config "$config" --print-config; then
    same_again "round trip of the defaults"
    same_again "round trip" --data LICENSE 'a "b"\c' "$(printf 'tab\tand \303\244')" --dp 3 \
        --lr 0.12345678901234567 --eps 3e-300 --seed 9223372036854775807 --sac budget=3MiB \
        --memory-limit 5GiB --reduce-overlap 0 --keep-gathered 1 --tie-embeddings --hash --pp 2 \
        --pp-layers 1,3 --schedule zb-h1 --log "$dir/log" --kv-heads 2 --lr-schedule wsd
    same_again "round trip of 2^53" --seed 9007199254740992
    # What came out is what was asked for.
    for line in '"dp": 3' '"lr": 0.12345678901234566' '"seed": "9223372036854775807"' \
        '"sac": "budget=3145728"' '"memory-limit": 5368709120' '"reduce-overlap": false' \
        '"tie-embeddings": true' '"pp-layers": "1,3"' '"steps": 100' '"device": "auto"' \
        '"data": \["LICENSE", "a \\"b\\"\\\\c", "tab\\u0009and .*"\]'; do
        run --data LICENSE 'a "b"\c' "$(printf 'tab\tand \303\244')" --dp 3 \
            --lr 0.12345678901234567 --seed 9223372036854775807 --sac budget=3MiB \
            --memory-limit 5GiB --reduce-overlap 0 --tie-embeddings --pp-layers 1,3 --print-config
        expect "--print-config: $line" "^  $line,?\$" 1
    done

    # One option of a kind wrong; the message has the file and the key.
    while IFS='|' read -r words text; do
        write "$text"
        refuse "config.json: \"$words" --config "$config" $data
    done <<'EOF'
dp" is there twice|{"dp": 2, "dp": 2}
nope": unknown key|{"nope": 1}
--dp": unknown key|{"--dp": 2}
config" cannot stand|{"config": "x"}
help" cannot stand|{"help": true}
dp": must be a number|{"dp": "2"}
dp": must be a number|{"dp": null}
dp": 1.5: not a whole|{"dp": 1.5}
dp": 99999: must be at most|{"dp": 99999}
dp": 0: must be at least|{"dp": 0}
lr": must be a number|{"lr": true}
lr": inf: not a number|{"lr": 1e999}
lr": -1: must be within|{"lr": -1}
data": must be an array|{"data": "x"}
data": must be an array|{"data": []}
data": must be an array|{"data": ["x", 3]}
data": must be an array|{"data": {"a": "x"}}
device": gpu: must be one of|{"device": "gpu"}
device": must be a string|{"device": 1}
hash": must be true or false|{"hash": 1}
sp": must be true or false|{"sp": "1"}
reduce-overlap": must be true|{"reduce-overlap": 1}
log": needs a name|{"log": ""}
log": must be a string|{"log": ["x"]}
pp-layers": must be a string|{"pp-layers": 3}
sac": must be a string|{"sac": 1}
sac": budget=0: the budget|{"sac": "budget=0"}
memory-limit": 1XB: suffixes|{"memory-limit": "1XB"}
memory-limit": must be a number|{"memory-limit": false}
seed": must be a number|{"seed": "12"}
seed": 9007199254740992: from 2^53|{"seed": 9007199254740993}
EOF
    for text in '{' '' '[1]' '{"dp": 1} x' '{"dp": 1,}' 'null' '{"log": "a\u0000b"}'; do
        write "$text"
        refuse "--config $config: " --config "$config" $data
    done
    refuse "no-such-file" --config "$dir/no-such-file" $data
    refuse "directory" --config "$dir" $data
    refuse "twice" --config "$config" --config "$config" $data

    # The command line wins, whichever comes first; what it leaves out is the file's.
    write '{"steps": 3, "layers": 1, "data": ["'"$dir/short"'"], "lr": 0.5, "hash": true}'
    if run --steps 2 --config "$config" --hidden 32 --seq-len 32 $data &&
        grep -q "^step 2/2 " "$dir/out" &&
        grep -q 'lr 0.5 ' "$dir/out" && grep -q '^hash ' "$dir/out"; then
        pass "flags win over the file"
    else fail "flags win over the file" "$(tail -n 1 "$dir/out")"; fi
    write '{"steps": 2, "hidden": 32, "layers": 2, "seq-len": 32, "data": ["'"$dir/data.txt"'"]}'
    if run --config "$config" && grep -q '^step 2/2 ' "$dir/out"; then pass "a file alone trains"
    else fail "a file alone trains" "it does not"; fi
    cp "$config" "$dir/before.json"
    refuse "would be written over --config" --config "$config" --log "$config"
    refuse "would be written over --config" --config "$config" --memory-json "$dir/./config.json"
    if cmp -s "$config" "$dir/before.json"; then pass "the file of settings stays as it was"
    else fail "the file of settings stays as it was" "it changed"; fi
else
    echo "skip options in a file: $trainer was built without cJSON"
fi

# A program without cJSON says so, and how to have it.
if ${CC:-cc} -std=c11 -O0 -I. examples/train_llama.c -o "$dir/bare" -lm -lpthread 2>"$dir/err"; then
    whole=$trainer trainer=$dir/bare
    refuse "libcjson-dev" --config "$config" $data
    if run --print-config; then pass "--print-config needs no cJSON"
    else fail "--print-config needs no cJSON" "it fails"; fi
    trainer=$whole
else
    fail "builds without libraries" "it does not"
fi

# --------------------------------------------------------------------------- output, log, learning

begin=$(date +%s)
# shellcheck disable=SC2086
if run $small $data --steps 60 --dp 2 --zero-stage 3 --sac selective --lr 0.003 --warmup 5 \
    --micro-batches 2 --micro-batch-size 4 --log "$dir/log" --sample 40 \
    --token-dtype bytes --hash; then
    pass "trains 60 steps"
else
    fail "trains 60 steps" "exit status $?"
fi
if [ -s "$dir/err" ]; then fail "quiet on standard error" "it is not"; else pass "no errors"; fi
expect "a progress line a step" "^step [0-9]+/60 \\| loss [0-9]+\\.[0-9]{4} \\| norm [0-9.]+ \
\\| lr [0-9.e-]+ \\| [0-9]+ tok/s \\| peak [0-9.]+ MiB\$" 60
expect "one hash line" '^hash [0-9a-f]{16}$' 1
expect "plan equals run" 'equal to the plan, to the byte' 1
expect "plan comes first" '^plan: ' 1
expect "bytes sent" '^bytes sent by each rank' 1
expect "a table of the gathers" 'all[-_ ]gather' 1
expect "a sample" '^sample: ' 1

# The log: one object a step, exactly these keys, the last loss well below the first.
cat >"$dir/log.awk" <<'AWK'
{
    number = "-?[0-9]+(\\.[0-9]+)?(e[-+]?[0-9]+)?"
    row = "^\\{\"step\": ?" NR ", ?\"loss\": ?" number ", ?\"grad_norm\": ?" number ", ?\"lr\": ?" \
        number ", ?\"tokens\": ?" NR * 512 ", ?\"tokens_per_s\": ?" number \
        ", ?\"peak_bytes\": ?[0-9]+, ?\"step_s\": ?" number ", ?\"elapsed_s\": ?" number \
        ", ?\"wall_time\": ?[0-9]+(\\.[0-9]+)?, ?\"skipped\": ?0\\}$"
    if ($0 !~ row) { print "line " NR ": " $0; bad = 1 }
    split($0, part, /"elapsed_s": ?/)
    if (!(part[2] + 0 > elapsed)) { print "line " NR ": elapsed_s does not grow"; bad = 1 }
    elapsed = part[2] + 0
    split($0, part, /"wall_time": ?/)
    if (part[2] < begin || part[2] > begin + 600) { print "wall_time " part[2]; bad = 1 }
    split($0, part, /"loss": ?/)
    loss = part[2] + 0
    if (NR == 1) first = loss
}
END {
    if (NR != 60) { print NR " lines"; bad = 1 }
    if (!(first > 5.3 && first < 5.8)) { print "first loss " first; bad = 1 }
    if (!(loss < first - 2)) { print "last loss " loss ", first " first; bad = 1 }
    exit bad
}
AWK
if awk -v begin="$begin" -f "$dir/log.awk" "$dir/log" >"$dir/err"; then
    pass "log: format and learning"
else fail "log: format and learning" "see below"; fi
if grep -q '"lr":0.0006[,}]' "$dir/log" && sed -n 5,60p "$dir/log" | grep -c '"lr":0.003,' |
    grep -q '^56$'; then
    pass "warm-up, then constant"
else
    fail "warm-up, then constant" "lr in the log is not 0.003 * min(1, step / 5)"
fi

# An event a figure and step; a second run of the directory has a file of its own. What is in the
# files is tests/test_tensorboard.c's business.
tb=$dir/runs/one
for n in 1 2; do
    # shellcheck disable=SC2086
    run $small $data --steps 3 --tensorboard "$tb" --eval-data "$dir/high" --vocab 255 \
        --eval-every 2
    files=$(ls "$tb" | grep -c '^events\.out\.tfevents\.[0-9]\{10\}\.')
    name="event files of run $n"
    if [ "$files" = $n ]; then pass "$name"; else fail "$name" "$files files"; fi
done
for tag in loss grad_norm lr tokens_per_s peak_bytes eval_loss; do
    # The tag after its length, which is its byte in octal.
    byte=$(printf '\\%03o' ${#tag})
    expected=6
    [ $tag = eval_loss ] && expected=4 # after steps 2 and 3
    n=$(cat "$tb"/* | LC_ALL=C grep -a -o "$(printf "$byte$tag")" | wc -l)
    if [ "$n" -eq $expected ]; then pass "events of $tag"
    else fail "events of $tag" "$n, not $expected"; fi
done
# shellcheck disable=SC2086
refuse "data.txt: cannot make" $small $data --tensorboard "$dir/data.txt"

# --------------------------------------------------------------- meta: no data, the same bytes

tags='\{("[a-z]+": ?[0-9]+,? ?){8}\}'
json='^\{"ranks": ?\[(\{"rank": ?[0-9]+, ?"peak_bytes": ?[0-9]+, ?"tags": ?'$tags'\},? ?)+\]\}$'

# A budget half way between the most and the least that a layout needs.
peak() {
    rm -f "$dir/peak"
    # shellcheck disable=SC2086
    run $small --device meta --memory-json "$dir/peak" $1
    grep -o '"peak_bytes": *[0-9]*' "$dir/peak" | tr -dc '0-9\n' | sort -n | tail -n 1
}
half_way() { echo $((($(peak "$1 --sac none") + $(peak "$1 --sac full")) / 2)); }

batch="--micro-batch-size 2 --dp 2"
pipe="$batch --pp 2 --schedule zb-h1 --zero-stage 2 --micro-batches 4"
# shellcheck disable=SC2086
for layout in "--dp 1" "--dp 3 --zero-stage 0" "--dp 2 --zero-stage 1 --micro-batches 3" \
    "--dp 3 --zero-stage 2 --sac full --reduce-overlap 0" "--dp 4 --zero-stage 3 --sac selective" \
    "--dp 2 --zero-stage 3 --sac full --prefetch 0 --tie-embeddings --micro-batches 3" \
    "$batch --zero-stage 3 --sac budget=$(half_way "$batch --zero-stage 3")" \
    "$pipe --sac budget=$(half_way "$pipe")" \
    "--dp 3 --zero-stage 3 --dtype bf16 --prefetch 2"; do
    name="plan is the run: $layout"
    rm -f "$dir/meta" "$dir/cpu"
    if ! run $small $layout --device meta --memory-json "$dir/meta"; then fail "$name" "meta failed"
    elif ! run $small $layout $data --steps 2 --memory-json "$dir/cpu"; then
        fail "$name" "cpu failed"
    elif ! cmp -s "$dir/meta" "$dir/cpu"; then fail "$name" "memory files differ"
    elif ! grep -q -E "$json" "$dir/cpu"; then fail "$name" "not the format: $(cat "$dir/cpu")"
    else pass "$name"
    fi
done

# ------------------------------------------------------------------------- allocators and limits

layout="$batch --zero-stage 3 --steps 2 --hash"
reference=
for allocator in system caching arena; do
    # shellcheck disable=SC2086
    run $small $data $layout --allocator $allocator
    hash=$(grep '^hash ' "$dir/out")
    [ -n "$reference" ] || reference=$hash
    ratio=$(sed -n 's/.*reserved: at most .* bytes, \([0-9.]*\) times the peak/\1/p' "$dir/out")
    case $allocator:$ratio in
    system: | caching:[1-9]* | arena:1.0[0-4]*) held=yes ;;
    *) held=no ;;
    esac
    if [ -n "$hash" ] && [ "$hash" = "$reference" ] && [ $held = yes ]; then
        pass "allocator $allocator"
    else
        fail "allocator $allocator" "'$hash', not '$reference'; reserved '$ratio' times the peak"
    fi
done

# A byte less than the peak is refused before anything runs; every flag that is offered then fits,
# with the peak that was promised.
least=$(peak "$batch")
name="a limit that is the peak fits"
# shellcheck disable=SC2086
if run $small $data $batch --steps 1 --memory-limit "$least" && grep -q "fits in" "$dir/out"; then
    pass "$name"
else fail "$name" "it is refused"; fi
name="a limit below the peak is refused, with what would fit"
# shellcheck disable=SC2086
run $small $data $batch --steps 1 --memory-limit $((least - 1))
if [ $? = 1 ] && grep -q "nothing was allocated" "$dir/err" && ! grep -q "^step" "$dir/out" &&
    grep -q "what would fit" "$dir/out"; then pass "$name"
else fail "$name" "$(cat "$dir/err")"; fi
sed -n '/what would fit/,$p' "$dir/out" | grep -e '  --' | tr -d , |
    awk '{ printf "%s", $1; for (i = 4; i <= NF; i++) printf " %s", $i; print "" }' >"$dir/offers"
offers=0
while read -r bytes flags; do
    offers=$((offers + 1))
    name="offered: $flags"
    # shellcheck disable=SC2086
    if run $small --device meta $batch $flags --memory-limit "$bytes" &&
        [ "$(peak "$batch $flags")" = "$bytes" ]; then pass "$name"
    else fail "$name" "it does not need $bytes bytes"; fi
done <"$dir/offers"
if [ $offers -ge 2 ]; then pass "changes are offered"; else fail "changes are offered" "$offers"; fi

begin=$(date +%s)
if run --device meta --dp 8 --zero-stage 3 --sac full --hidden 8192 --layers 80 --heads 64 \
    --kv-heads 8 --intermediate 28672 --vocab 128256 --dtype bf16 --seq-len 8192 \
    --micro-batch-size 1 && [ $(($(date +%s) - begin)) -le 20 ]; then
    pass "plans 70 billion weights"
else
    fail "plans 70 billion weights" "failed, or took more than 20 s"
fi
if run --device meta --data "$dir/data.txt"; then pass "meta takes --data"
else fail "meta takes --data" "it fails"; fi

# -------------------------------------------------------------- one hash for every layout and run

for dtype in fp32 bf16; do
    reference=
    for layout in "--zero-stage 0" "--zero-stage 0" "--zero-stage 1 --sac full" \
        "--zero-stage 2 --sac selective" "--zero-stage 3 --sac none --prefetch 0" \
        "--zero-stage 3 --sac full --prefetch 3" "--zero-stage 2 --reduce-overlap 0" \
        "--zero-stage 3 --sac budget=$(half_way "$batch --zero-stage 3 --dtype $dtype")"; do
        # shellcheck disable=SC2086
        run $small $data $batch --steps 3 --dtype $dtype --hash $layout
        hash=$(grep '^hash ' "$dir/out")
        [ -n "$reference" ] || reference=$hash
        if [ -n "$hash" ] && [ "$hash" = "$reference" ]; then pass "hash, $dtype $layout"
        else fail "hash, $dtype $layout" "'$hash', not '$reference'"; fi
    done
    # shellcheck disable=SC2086
    run $small $data $batch --steps 3 --dtype $dtype --hash --seed 1
    hash=$(grep '^hash ' "$dir/out")
    if [ -n "$hash" ] && [ "$hash" != "$reference" ]; then pass "another seed, another hash"
    else fail "another seed, another hash" "'$hash'"; fi
done

finish
