#!/bin/sh
# The trainer's checkpoints as its users meet them: a run that was killed, or stopped by a signal,
# continues as if it had not been; what cannot be continued is refused and says why.
#
# usage: tests/test_resume.sh       tests $FT_TRAINER, default build/train_llama
# Last line: "N passed, N failed".
in_memory=1
. "$(dirname "$0")/shell.sh"

counting 250 >"$dir/data.txt"
shape="--hidden 32 --heads 4 --kv-heads 2 --seq-len 32 --micro-batch-size 2"
small="$shape --layers 2 --data $dir/data.txt"
ck="$dir/ck"

# refuse WORDS ARGUMENTS...: an exit status of 1 or 2, and one line of error that holds WORDS.
refuse() {
    words=$1
    shift
    run "$@"
    status=$?
    name="refuses $(echo "$*" | sed "s|$dir/||g")"
    if [ $status != 1 ] && [ $status != 2 ]; then fail "$name" "exit status $status"
    elif [ "$(wc -l <"$dir/err")" -ne 1 ]; then fail "$name" "more than one line of error"
    elif ! grep -q -e "$words" "$dir/err"; then fail "$name" "does not say: $words"
    else pass "$name"
    fi
}

# once ARGUMENTS...: refused, and the error names one rank, once.
once() {
    run "$@" && fail "names its rank once" "was not refused"
    if [ "$(grep -o "rank [0-9]" "$dir/err" | wc -l)" -eq 1 ]; then
        pass "names its rank once: $(cut -d: -f4- "$dir/err")"
    else fail "names its rank once" "$(cat "$dir/err")"
    fi
}

# shellcheck disable=SC2086
{
    run $small --steps 1 --checkpoint-dir "$dir/probe"
    if grep -q "built without checkpoints" "$dir/err"; then
        refuse "built without checkpoints" $small --steps 1 --checkpoint-dir "$ck"
        refuse "lcjson" $small --steps 1 --resume "$ck"
        echo "skipped: this trainer has no checkpoints"
        finish
    fi
    refuse "--keep needs --checkpoint-dir" $small --keep 2
    refuse "--checkpoint-every needs --checkpoint-dir" $small --checkpoint-every 2
    refuse "looks in --checkpoint-dir" $small --resume
    refuse "looks in --checkpoint-dir" $small --resume auto
    refuse "at least 1" $small --checkpoint-dir "$ck" --keep 0
    refuse "at least 1" $small --checkpoint-dir "$ck" --checkpoint-every 0
    refuse "needs a name" $small --checkpoint-dir ""
    refuse "needs a value" $small --checkpoint-dir
    refuse "no-such" $small --resume "$dir/no-such"
    refuse "no directory" $small --checkpoint-dir "$dir/data.txt"
    refuse "/proc/none" $small --checkpoint-dir /proc/none/ck
}

value() { sed -n "s/^$1 //p" "$dir/out"; }
# Rows of two logs: what a step computed, without its times.
rows() { sed 's/,"tokens_per_s".*//' "$1"; }

drop_last() { sed '$d' "$1" >"$dir/rest" && mv "$dir/rest" "$1"; }

# wait_for PATH: until it is there, for at most 20 s.
wait_for() {
    tries=0
    until [ -e "$1" ]; do
        tries=$((tries + 1))
        [ $tries -gt 400 ] && return 1
        sleep 0.05
    done
}

# wait_rows FILE N: until it has so many lines.
wait_rows() {
    tries=0
    until [ -e "$1" ] && [ "$(wc -l <"$1")" -ge "$2" ]; do
        tries=$((tries + 1))
        [ $tries -gt 1000 ] && return 1
        sleep 0.02
    done
}

# ---------------------------------------------------------- killed, and resumed on the same mesh

# killed NAME ARGUMENTS...: bit for bit the run that nobody killed, and the same log.
killed() {
    name=$1
    shift
    rm -rf "$ck" "$dir"/*.jsonl
    run "$@" --hash --log "$dir/whole.jsonl" || fail "$name" "the whole run failed"
    hash=$(value hash)
    "$trainer" "$@" --checkpoint-dir "$ck" --checkpoint-every 15 --keep 2 \
        --log "$dir/part.jsonl" >/dev/null 2>&1 &
    child=$!
    wait_rows "$dir/part.jsonl" 40
    kill -KILL $child 2>/dev/null || fail "$name" "was over before it could be killed"
    wait $child 2>/dev/null
    printf '{"step":9' >>"$dir/part.jsonl" # a row that it was writing
    if ! run "$@" --checkpoint-dir "$ck" --checkpoint-every 15 --keep 2 --log "$dir/part.jsonl" \
        --resume --hash; then fail "$name" "resuming failed"
    elif ! grep -q "^resumed from $ck/step-" "$dir/out"; then fail "$name" "did not resume"
    elif [ "$(value hash)" != "$hash" ]; then fail "$name" "hash $(value hash), not $hash"
    elif [ "$(rows "$dir/part.jsonl")" != "$(rows "$dir/whole.jsonl")" ]; then
        fail "$name" "another log"
    elif [ "$(ls "$ck" | grep -c '^step-')" != 2 ]; then fail "$name" "keeps others: $(ls "$ck")"
    elif ! grep -q "equal to the plan" "$dir/out"; then fail "$name" "not as planned"
    else pass "$name"
    fi
}

wave="--steps 400 --lr-schedule cosine --warmup 5 --lr-floor 0.0001"
# shellcheck disable=SC2086
{
    killed "killed and resumed, ZeRO-0" $small $wave --dp 2
    killed "killed and resumed, ZeRO-1 in bf16" $small $wave --dp 2 --zero-stage 1 --dtype bf16
    killed "killed and resumed, ZeRO-2 on a mesh" $small $wave --dp 2 --tp 2 --zero-stage 2
    killed "killed and resumed, ZeRO-3, pipeline, tied, arena" $small $wave --dp 2 --pp 2 \
        --zero-stage 3 --tie-embeddings --micro-batches 2 --allocator arena
}

# ------------------------------------------------------------------------- another mesh, the data

# shellcheck disable=SC2086
{
    rm -rf "$ck" "$dir"/*.jsonl
    run $small --steps 9 --dp 4 --log "$dir/whole.jsonl"
    run $small --steps 6 --dp 4 --zero-stage 3 --checkpoint-dir "$ck" --log "$dir/part.jsonl"
    run $small --steps 9 --dp 2 --pp 2 --zero-stage 1 --micro-batches 2 --checkpoint-dir "$ck" \
        --resume --log "$dir/part.jsonl"
    if awk -F '[:,]' 'NR == FNR { loss[$2] = $4; next }
        { d = $4 - loss[$2]; if (d > 2e-6 || d < -2e-6 || !($2 in loss)) exit 1; n++ }
        END { exit n != 9 }' "$dir/whole.jsonl" "$dir/part.jsonl"; then
        pass "the same losses on another mesh"
    else fail "the same losses on another mesh" "$(rows "$dir/part.jsonl" | tail -n 1)"
    fi
    run $small --steps 12 --dp 3 --checkpoint-dir "$ck" --resume --log "$dir/part.jsonl"
    if grep -q '^{"step":10,.*"tokens":2496,' "$dir/part.jsonl" &&
        grep -q '^{"step":12,.*"tokens":2880,' "$dir/part.jsonl"; then
        pass "another global batch continues in the data" # 9 x 8 sequences, then 6 a step
    else fail "another global batch continues in the data" "$(tail -n 1 "$dir/part.jsonl")"
    fi
    run $small --steps 12 --dp 3 --hash --checkpoint-dir "$ck" --resume --sample 3 \
        --report "$dir/r.html"
    run $small --steps 12 --dp 3 --hash --checkpoint-dir "$ck" --resume --allocator arena
    if grep -q "nothing to train: the checkpoint is at step 12 of 12" "$dir/out" &&
        grep -q "^hash " "$dir/out"; then pass "a run that is over"
    else fail "a run that is over" "$(tail -n 1 "$dir/out")"
    fi
    refuse "random.seed was 0, here it is 5" $small --steps 20 --seed 5 --checkpoint-dir "$ck" \
        --resume
    refuse "another model: model.layers is 2 there, 3 here" $shape --layers 3 --steps 20 \
        --data "$dir/data.txt" --checkpoint-dir "$ck" --resume
    refuse "its optimizer is adamw" $small --optimizer sgd --steps 20 --checkpoint-dir "$ck" \
        --resume
    refuse "give --checkpoint-dir $ck --resume auto, or --resume $ck/step-00000012$" $small \
        --resume "$ck"
    refuse "or --resume $ck/step-00000012$" $small --checkpoint-dir "$ck" --resume "$ck/"
    refuse "give --checkpoint-dir $ck/, and --resume $ck/step-00000012 to continue" $small \
        --resume --checkpoint-dir "$ck/step-00000012"
    refuse "give --checkpoint-dir $ck/, and" $small --checkpoint-dir "$ck/step-00000012//"
    if run $small --device meta --checkpoint-dir "$ck/step-00000012"; then
        pass "a plan looks at no checkpoint"
    else fail "a plan looks at no checkpoint" "refused"
    fi
    for ranks in 1 4; do
        once $small --optimizer sgd --steps 20 --checkpoint-dir "$ck" --resume --dp $ranks
        once $small --steps 20 --resume "$dir/no-such" --dp $ranks
    done
    refuse "had data of" $shape --layers 2 --data "$dir/data.txt" "$dir/data.txt" \
        --steps 20 --resume "$ck/step-00000012"
}

# ------------------------------------------------------------------------------ what has changed

# changes LINES ARGUMENTS...: continues, and says this of what is learned otherwise; each line ends
# with a ;
changes() {
    lines=$1
    shift
    name="says what has changed: $(echo "$*" | sed "s|$dir/||g")"
    if ! run "$@" --seq-len 32 --hidden 32 --heads 4 --kv-heads 2 --layers 2 --data "$dir/data.txt"
    then fail "$name" "refused"
    elif [ "$(sed -n 's/^resume: //p' "$dir/out" | tr '\n' ';')" != "$lines" ]; then
        fail "$name" "$(grep "^resume: " "$dir/out")"
    else pass "$name"
    fi
}

# shellcheck disable=SC2086
{
    rm -rf "$ck"
    run $small --dp 2 --steps 2 --checkpoint-dir "$ck"
    from="--micro-batch-size 2 --steps 3 --resume $ck/step-00000002"
    changes "" $from --dp 2
    changes "" $from --dp 2 --tp 2 --zero-stage 3 --sac full --momentum 0.5 --lr-decay 1
    changes "" --micro-batch-size 1 --micro-batches 4 --steps 3 --resume "$ck/step-00000002"
    changes "--lr 0.001 -> 0.0005;" $from --dp 2 --lr 0.0005
    changes "--lr 0.001 -> 0.00100000001;" $from --dp 2 --lr 0.00100000001
    changes "--warmup 0 -> 5;" $from --dp 2 --warmup 5
    changes "--weight-decay 0.1 -> 0;--grad-clip 1 -> 2;" $from --dp 2 \
        --weight-decay 0 --grad-clip 2
    changes "--beta1 0.9 -> 0.8;--beta2 0.95 -> 0.9;--eps 1e-08 -> 1e-07;" $from --dp 2 \
        --beta1 0.8 --beta2 0.9 --eps 1e-7
    changes "--lr-schedule constant -> cosine;--lr-floor 0 -> 0.0001;--steps 2 -> 3;" $from --dp 2 \
        --lr-schedule cosine --lr-floor 0.0001
    changes "--lr-schedule constant -> wsd;--lr-decay 0 -> 2;--steps 2 -> 3;" $from --dp 2 \
        --lr-schedule wsd --lr-decay 2
    changes "--dtype fp32 -> bf16;--reduce-dtype same -> fp32;" $from --dp 2 --dtype bf16 \
        --reduce-dtype fp32
    changes "--accumulate-dtype same -> fp32;" $from --dp 2 --accumulate-dtype fp32
    changes "global batch 4 -> 6 sequences;" $from --dp 3
    changes "global batch 4 -> 8 sequences;" $from --dp 2 --micro-batches 2
    refuse "other samples; give 32" $from --layers 2 --hidden 32 --heads 4 --kv-heads 2 \
        --data "$dir/data.txt" --seq-len 16
    refuse "documents end elsewhere" $shape --layers 2 --data "$dir/data.txt" --eod-token 10 \
        --resume "$ck/step-00000002"
    # A checkpoint of before --lr-schedule was stored. Its manifest ends with the hash of itself.
    printf '%s\n' '#include <stdio.h>' '#include <xxhash.h>' 'static char text[1 << 22];' \
        'int main(void) { size_t n = fread(text, 1, sizeof text, stdin);' \
        '    printf("%s,\"xxh3\":\"%016llx\"}\n", text,' \
        '           (unsigned long long)XXH3_64bits(text, n)); }' >"$dir/seal.c"
    manifest="$ck/step-00000002/manifest.json"
    if ${CC:-cc} "$dir/seal.c" -o "$dir/seal" -lxxhash 2>"$dir/err"; then
        sed -e 's/"train\.\(lr_schedule\|doc_mask\)":"[a-z0-9]*",//g' \
            -e 's/,"xxh3":"[0-9a-f]*"}$//' "$manifest" | tr -d '\n' >"$dir/text"
        "$dir/seal" <"$dir/text" >"$manifest"
        grep -q lr_schedule "$manifest" && fail "an older checkpoint" "has the key"
        changes "--lr-floor 0 -> 0.0001;--steps 2 -> 3;" $from --dp 2 --lr-schedule cosine \
            --lr-floor 0.0001
    else echo "skipped: an older checkpoint, which needs a compiler"
    fi
    rm -rf "$ck"
    run $small --dp 2 --steps 2 --eod-token 10 --doc-mask --checkpoint-dir "$ck"
    changes "" $from --dp 2 --eod-token 10 --doc-mask
    changes "--doc-mask 1 -> 0;" $from --dp 2 --eod-token 10
    rm -rf "$ck"
    run $small --optimizer sgd --steps 2 --checkpoint-dir "$ck"
    changes "--momentum 0.9 -> 0.5;" $from --optimizer sgd --momentum 0.5 --beta1 0.5
}

# ---------------------------------------------------------------------------------- validation

# shellcheck disable=SC2086
{
    # A log that is no file cannot be cut, and need not.
    rm -rf "$ck"
    run $small --steps 1 --checkpoint-dir "$ck"
    mkfifo "$dir/pipe"
    cat "$dir/pipe" "$dir/pipe" >"$dir/piped" & # opened once to try it, and once to log
    reader=$!
    if run $small --steps 2 --checkpoint-dir "$ck" --resume --log /dev/null &&
        run $small --steps 3 --checkpoint-dir "$ck" --resume --log "$dir/pipe" &&
        wait_rows "$dir/piped" 1 && grep -q '^{"step":3,' "$dir/piped"; then
        pass "a log that is a pipe or a device"
    else fail "a log that is a pipe or a device" "refused, or nothing came"
    fi
    kill $reader 2>/dev/null # it may be over, or wait for another writer
    wait $reader 2>/dev/null
    # The validation of step 4 comes after its checkpoint: whether or not it has come, it is there
    # once. The same of the last step.
    rm -rf "$ck" "$dir"/*.jsonl
    valid="$small --dp 2 --zero-stage 3 --allocator arena --eval-data $dir/data.txt --eval-every 2"
    run $valid --steps 6 --log "$dir/whole.jsonl"
    for left in all but-the-last; do
        rm -rf "$ck"
        run $valid --steps 4 --checkpoint-dir "$ck" --log "$dir/part.jsonl"
        [ $left = all ] || drop_last "$dir/part.jsonl"
        run $valid --steps 6 --checkpoint-dir "$ck" --resume --log "$dir/part.jsonl"
        equal=$(grep -c "equal to the plan" "$dir/out")
        [ $left = all ] || drop_last "$dir/part.jsonl"
        run $valid --steps 6 --checkpoint-dir "$ck" --resume --log "$dir/part.jsonl"
        for log in whole part; do rows "$dir/$log.jsonl" | sed 's/,"elapsed_s".*//'; done |
            sort | uniq -c >"$dir/rows"
        if [ "$equal" = 1 ] && [ "$(wc -l <"$dir/rows")" = 9 ] &&
            ! grep -qv "^ *2 " "$dir/rows"; then pass "validations of a resumed run, $left there"
        else fail "validations of a resumed run, $left there" "$(grep -v '^ *2 ' "$dir/rows")"
        fi
    done
}

# ---------------------------------------------------------------------------- damage, a full disk

# shellcheck disable=SC2086
{
    rm -rf "$ck"
    run $small --steps 4 --dp 2 --checkpoint-dir "$ck" --checkpoint-every 2
    part="$ck/step-00000004/rank-00001.safetensors"
    printf 'xxxx' | dd of="$part" bs=1 seek=$(($(wc -c <"$part") - 50)) conv=notrunc 2>/dev/null
    if run $small --steps 5 --dp 2 --checkpoint-dir "$ck" --resume &&
        grep -q "^passed over: .*step-00000004/rank-00001" "$dir/out" &&
        grep -q "resumed from $ck/step-00000002 at step 2 of 5" "$dir/out"; then
        pass "a damaged checkpoint is passed over"
    else fail "a damaged checkpoint is passed over" "$(cat "$dir/err")"
    fi
    refuse "damaged" $small --steps 9 --dp 2 --resume "$ck/step-00000004"
    (
        trap '' XFSZ
        ulimit -f 8
        run $small --steps 9 --dp 2 --checkpoint-dir "$ck" --checkpoint-every 3 --resume
    )
    status=$?
    if [ $status = 1 ] && grep -q "rank-0000.*too large" "$dir/err" &&
        [ -d "$ck/step-00000005" ] && [ ! -d "$ck/step-00000006" ] &&
        run $small --steps 9 --dp 2 --checkpoint-dir "$ck" --resume &&
        grep -q "at step 5 of 9" "$dir/out"; then pass "a full disk loses nothing"
    else fail "a full disk loses nothing" "status $status"
    fi
}

# ------------------------------------------------------------- an export that could not be written

# early WORDS ARGUMENTS...: an export that would be refused in the end is refused before the first
# step.
early() {
    refuse "$@" --steps 3
    if grep -q "^step 1/" "$dir/out"; then fail "before it trains" "trained first"; fi
}

# shellcheck disable=SC2086
{
    early "cannot create a directory beside it" $small --export "$dir/no/such/place"
    early "is not empty (it has ck)" $small --export "$dir/e1" --checkpoint-dir "$dir/e1/ck"
    early "is not empty" $small --export "$dir/e2" --checkpoint-dir "$dir/e2"
    early "is not empty (it has events" $small --export "$dir/e3" --tensorboard "$dir/e3"
    early "is a file" $small --export "$dir/e4" --log "$dir/e4"
    mkdir "$dir/e5"
    early "is not empty (it has log)" $small --export "$dir/e5" --log "$dir/e5/log"
    if [ "$(id -u)" = 0 ] && mkdir "$dir/e6" && mount --bind "$dir/e6" "$dir/e6" 2>/dev/null; then
        early "file system is mounted" $small --export "$dir/e6"
        umount "$dir/e6"
    fi
    mkdir "$dir/e7"
    if run $small --steps 2 --export "$dir/e7" --checkpoint-dir "$dir/e7ck" &&
        run $small --steps 2 --export "$dir/e7" --checkpoint-dir "$dir/e7ck" --resume &&
        grep -q "^nothing to train" "$dir/out" && grep -q "^exported $dir/e7, fp32" "$dir/out" &&
        [ "$(ls -d "$dir"/e7.* 2>/dev/null)" = "" ]; then pass "an export of a run that is over"
    else fail "an export of a run that is over" "$(ls -d "$dir"/e7*)"
    fi
}

# --------------------------------------------------------------------------------------- signals

# stopped SIGNAL STATUS ARGUMENTS...: sends it in the middle of a long run.
stopped() {
    signal=$1 expected=$2
    shift 2
    rm -f "$dir/run.jsonl"
    "$trainer" "$@" --steps 1000000 --log "$dir/run.jsonl" >"$dir/out" 2>"$dir/err" &
    child=$!
    wait_rows "$dir/run.jsonl" 3
    kill -"$signal" $child
    wait $child
    status=$?
    step=$(sed -n "s/^stopped by SIG$signal after step \([0-9]*\) of 1000000.*/\1/p" "$dir/out")
    if [ $status != "$expected" ]; then fail "SIG$signal" "exit status $status, not $expected"
    elif [ -z "$step" ]; then fail "SIG$signal" "does not say where it stopped"
    else return 0
    fi
    return 1
}

# shellcheck disable=SC2086
{
    rm -rf "$ck"
    if stopped TERM 0 $small --dp 3 --zero-stage 2 --checkpoint-dir "$ck"; then
        run $small --dp 3 --zero-stage 2 --steps $((step + 3)) --hash
        hash=$(value hash)
        run $small --dp 3 --zero-stage 2 --steps $((step + 3)) --hash --checkpoint-dir "$ck" --resume
        if [ "$(value hash)" = "$hash" ] && grep -q "at step $step of" "$dir/out"; then
            pass "SIGTERM saves the step that ran, and the run continues"
        else fail "SIGTERM saves the step that ran, and the run continues" "another hash"
        fi
    fi
    stopped TERM 143 $small --dp 2 && grep -q "nothing was saved" "$dir/out" &&
        pass "SIGTERM without a directory"
    rm -rf "$ck"
    # A step of many seconds.
    "$trainer" --steps 1000000 --seq-len 512 --hidden 512 --layers 8 --micro-batch-size 8 \
        --data "$dir/data.txt" --checkpoint-dir "$ck" >"$dir/out" 2>"$dir/err" &
    child=$!
    wait_for "$ck/lock"
    sleep 0.3
    kill -TERM $child
    sleep 0.1
    kill -TERM $child
    wait $child
    status=$?
    if [ $status = 143 ] && [ "$(ls "$ck")" = lock ]; then pass "a second signal ends it at once"
    else fail "a second signal ends it at once" "status $status"
    fi
}

finish
