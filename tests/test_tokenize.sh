#!/bin/sh
# tools/tokenize.py: what it writes is what the trainer reads. The same text as bytes, as llm.c's
# shards and as Megatron-LM's data trains to the same weights, bit by bit, with documents and
# without; examples as text to those of their ids. And what it refuses.
#
# usage: tests/test_tokenize.sh      tests $FT_TRAINER, default build/train_llama
# Last line: "N passed, N failed". Without python3: skipped.
set -u

tool="$(cd "$(dirname "$0")/../tools" && pwd)/tokenize.py"
if ! command -v python3 >/dev/null 2>&1; then
    echo "no python3 here: tools/tokenize.py is not tested"
    echo "[  SKIPPED ] 1 test(s)"
    exit 0
fi
. "$(dirname "$0")/shell.sh"

tokenize() { $limit python3 "$tool" "$@" >"$dir/out" 2>"$dir/err"; }

# Three documents, so short that each step sees their ends; the last one is a line without an end.
# Some bytes are not ASCII.
counting 4 >"$dir/a.txt"
sed 's/ant/\xc3\xa9l\xc3\xa9phant/' "$dir/a.txt" >"$dir/b.txt"
printf 'fin' >"$dir/c.txt"
texts="$dir/a.txt $dir/b.txt $dir/c.txt"
# shellcheck disable=SC2086
cat $texts >"$dir/all.txt"

small="--hidden 32 --layers 2 --heads 4 --kv-heads 2 --seq-len 24 --vocab 260 --steps 4
    --micro-batch-size 4 --hash"

# hash NAME ARGUMENTS...: trains, and leaves the weights' hash in $hash.
hash() {
    name=$1
    shift
    # shellcheck disable=SC2086
    if $limit "$trainer" $small "$@" >"$dir/out" 2>"$dir/err"; then
        hash=$(sed -n 's/^hash //p' "$dir/out")
    else
        hash=failed
        fail "$name" "the trainer failed"
    fi
}

# same NAME WANTED ARGUMENTS...
same() {
    name=$1 wanted=$2
    shift 2
    hash "$name" "$@"
    if [ "$hash" = "$wanted" ] && [ "$hash" != failed ]; then pass "$name"
    else fail "$name" "hash $hash instead of $wanted"
    fi
}

# make NAME ARGUMENTS...: the tool succeeds and leaves no file but its outputs.
make() {
    name=$1
    shift
    if ! tokenize "$@"; then fail "$name" "exit status not 0"
    elif ls "$dir"/*.tmp-* >/dev/null 2>&1; then fail "$name" "a temporary file is left"
    else pass "$name"
    fi
}

bytes="--tokenizer bytes"
# Lists of words, on purpose.
# shellcheck disable=SC2086
{
    make "uint16" $texts $bytes --format uint16 --output "$dir/plain16.bin"
    make "uint32" $texts $bytes --format uint32 --output "$dir/plain32.bin"
    make "megatron" "$dir/all.txt" $bytes --format megatron --output "$dir/plain"
    hash "bytes" --data "$dir/all.txt"
    plain=$hash
    same "uint16 trains as bytes" "$plain" --data "$dir/plain16.bin"
    same "uint32 trains as bytes" "$plain" --data "$dir/plain32.bin"
    same "one document of megatron trains as bytes" "$plain" --data "$dir/plain"
    same "a format that is named" "$plain" --data "$dir/plain16.bin" --data-format uint16
    same "by its older name" "$plain" --data "$dir/plain16.bin" --token-dtype uint16

    # With documents: byte 0 ends each, which no text has.
    for text in $texts; do
        cat "$text"
        printf '\000'
    done >"$dir/ended"
    make "uint16 with ends" $texts $bytes --eod-token 0 --format uint16 --output "$dir/docs16.bin"
    make "megatron with ends" $texts $bytes --eod-token 0 --format megatron --output "$dir/docs.idx"
    make "uint16 in pieces" $texts $bytes --eod-token 0 --format uint16 --shard-tokens 100 \
        --output "$dir/cut.bin"
    hash "ended bytes" --data "$dir/ended" --eod-token 0
    ended=$hash
    same "uint16 with ends trains as bytes" "$ended" --data "$dir/docs16.bin" --eod-token 0
    same "in pieces" "$ended" --data "$dir"/cut-*.bin --eod-token 0
    same "megatron trains as bytes" "$ended" --data "$dir/docs.bin"
    hash "documents are seen" --data "$dir/ended"
    if [ "$hash" != "$ended" ]; then pass "documents are seen"
    else fail "documents are seen" "the end token changes nothing"
    fi
    hash "masked" --data "$dir/ended" --eod-token 0 --doc-mask
    masked=$hash
    if [ "$masked" != "$ended" ]; then pass "the mask is seen"
    else fail "the mask is seen" "--doc-mask changes nothing"
    fi
    same "megatron masked" "$masked" --data "$dir/docs" --doc-mask
    same "recomputed" "$masked" --data "$dir/docs" --doc-mask --sac full --zero-stage 3

    # Examples: text, and the ids that the tool makes of it.
    i=0
    while [ $i -lt 30 ]; do
        echo "{\"prompt\": \"$i + $i = \", \"answer\": \"$((i + i)) \\u00e9\"}"
        i=$((i + 1))
    done >"$dir/sums.jsonl"
    make "examples" "$dir/sums.jsonl" $bytes --format jsonl --output "$dir/ids.jsonl"
    hash "examples" --data "$dir/sums.jsonl" --eod-token 256
    same "ids train as their text" "$hash" --data "$dir/ids.jsonl" --eod-token 256
    hash "masked examples" --data "$dir/sums.jsonl" --eod-token 256 --doc-mask
    same "masked ids" "$hash" --data "$dir/ids.jsonl" --eod-token 256 --doc-mask

    # {"text": ...} is a document as a file is one.
    printf '{"text": "one\\n", "url": 1}\n{"id": 2, "text": "two"}' >"$dir/lines.jsonl"
    printf 'one\n\001two\001' >"$dir/lines.txt"
    make "lines" "$dir/lines.jsonl" $bytes --eod-token 1 --format uint16 --output "$dir/lines.bin"
    make "their text" "$dir/lines.txt" $bytes --format uint16 --output "$dir/lines2.bin"
    if cmp "$dir/lines.bin" "$dir/lines2.bin"; then pass "lines are documents"
    else fail "lines are documents" "another file"
    fi
    cp "$dir/docs.idx" "$dir/first.idx"
    make "again" $texts $bytes --eod-token 0 --format megatron --output "$dir/docs"
    if cmp "$dir/docs.idx" "$dir/first.idx"; then pass "the same bytes again"
    else fail "the same bytes again" "another index"
    fi
}

# The losses of a step do not depend on the split, also where rows have little to count.
for split in "--dp 2 --micro-batch-size 2" "--micro-batches 4 --micro-batch-size 1" \
    "--dp 4 --micro-batch-size 1 --zero-stage 3"; do
    # shellcheck disable=SC2086
    if $limit "$trainer" --hidden 32 --layers 2 --heads 4 --seq-len 24 --vocab 260 --steps 3 \
        --data "$dir/sums.jsonl" --eod-token 256 --doc-mask --eval-data "$dir/ids.jsonl" $split \
        >"$dir/out" 2>"$dir/err"; then
        sed -n 's/.*\(loss [0-9.]*\) | norm.*/\1/p; s/.*\(validation loss .*\)/\1/p' "$dir/out" \
            >"$dir/split"
        [ -e "$dir/losses" ] || cp "$dir/split" "$dir/losses"
        if cmp "$dir/split" "$dir/losses" && [ "$(wc -l <"$dir/split")" = 5 ]; then
            pass "losses with $split"
        else
            fail "losses with $split" "$(tr '\n' ' ' <"$dir/split")"
        fi
        if grep -q "equal to the plan, to the byte" "$dir/out"; then pass "plan with $split"
        else fail "plan with $split" "not the run's memory"
        fi
    else
        fail "losses with $split" "the trainer failed"
    fi
done

# --------------------------------------------------------------------------------------- refusals

# refuse WORDS COMMAND...: a line on standard error with the words, and no crash.
refuse() {
    words=$1
    shift
    name="refuses $(echo "$*" | sed "s|$dir/||g; s|.*tokenize.py ||")"
    $limit "$@" >"$dir/out" 2>"$dir/err"
    status=$?
    if [ $status = 0 ] || [ $status -ge 124 ]; then fail "$name" "exit status $status"
    elif [ "$(wc -l <"$dir/err")" -ne 1 ]; then fail "$name" "not one line on standard error"
    elif ! grep -q "^error: " "$dir/err"; then fail "$name" "no error: line"
    elif ! grep -q -e "$words" "$dir/err"; then fail "$name" "does not say: $words"
    elif ls "$dir"/*.tmp-* >/dev/null 2>&1; then fail "$name" "a temporary file is left"
    else pass "$name"
    fi
}
refuse_tool() {
    words=$1
    shift
    refuse "$words" python3 "$tool" "$@"
}
line() { printf '{"text": "good"}\n%s\n' "$1" >"$dir/bad.jsonl"; }

cp "$dir/lines.bin" "$dir/kept.bin"
shard="--tokenizer bytes --format uint16 --output $dir/kept.bin"
# shellcheck disable=SC2086
{
    for bad in '' 'null' '[1]' '{' '{"text": "a"} x' '{"text": "a", "text": "b"}' '{"text": 1}' \
        '{"prompt": "a"}' '{"text": "\ud800"}' "$(printf '{"text": "\200"}')"; do
        line "$bad"
        refuse_tool "bad.jsonl: line 2: " "$dir/bad.jsonl" $shard
    done
    refuse_tool "none.txt: No such file" "$dir/none.txt" $shard
    refuse_tool "Is a directory" "$dir" $shard
    : >"$dir/empty.txt"
    refuse_tool "no tokens" "$dir/empty.txt" $shard
    refuse_tool "token 65536 does not fit" "$dir/a.txt" $shard --eod-token 65536
    refuse_tool "no named tokens" "$dir/a.txt" $shard --eod-token '<end>'
    refuse_tool "shard counts 1 to" "$dir/a.txt" $shard --shard-tokens -1
    refuse_tool "cuts uint16 and uint32" "$dir/a.txt" --tokenizer bytes --format megatron \
        --output "$dir/docs" --shard-tokens 5
    refuse_tool "over the input" "$dir/kept.bin" $shard
    refuse_tool "over the input" "$dir/docs.bin" --tokenizer bytes --format megatron \
        --output "$dir/docs"
    refuse_tool "is for documents" "$dir/sums.jsonl" --tokenizer bytes --format jsonl \
        --output "$dir/ids.jsonl" --eod-token 5
    refuse_tool "\"answer\" is missing" "$dir/lines.jsonl" --tokenizer bytes --format jsonl \
        --output "$dir/ids.jsonl" --prompt-key text
    refuse_tool "end in .jsonl" "$dir/a.txt" --tokenizer bytes --format jsonl --output "$dir/x"
    refuse_tool "no-such-dir" "$dir/a.txt" --tokenizer bytes --format uint16 \
        --output "$dir/no-such-dir/x"
    if cmp "$dir/kept.bin" "$dir/lines.bin"; then pass "what was there stays"
    else fail "what was there stays" "it has changed"
    fi

    # Packages that are not there, and ones that stand in for them.
    mkdir -p "$dir/without/tokenizers" "$dir/without/transformers" "$dir/with"
    echo 'raise ImportError("not here")' >"$dir/without/tokenizers/__init__.py"
    echo 'raise ImportError("not here")' >"$dir/without/transformers/__init__.py"
    cat >"$dir/with/tokenizers.py" <<'END'
class Encoding:
    def __init__(self, ids): self.ids = ids
class Tokenizer:
    @staticmethod
    def from_file(name): return Tokenizer()
    def no_padding(self): pass
    def no_truncation(self): pass
    def encode(self, text, add_special_tokens): return Encoding([ord(c) for c in text])
    def token_to_id(self, name): return 300 if name == '<end>' else None
    def get_vocab_size(self): return 301
END
    echo '{}' >"$dir/tokenizer.json"
    shard="$dir/a.txt --format uint16 --output $dir/named.bin --tokenizer"
    PYTHONPATH="$dir/without" refuse_tool "needs the Python package tokenizers: pip install" \
        $shard "$dir/tokenizer.json"
    PYTHONPATH="$dir/without" refuse_tool "package transformers: pip install" $shard some/model
    PYTHONPATH="$dir/with" refuse_tool "no such token" $shard "$dir/tokenizer.json" \
        --eod-token "<x>"
    cp "$dir/b.txt" "$dir/latin.txt"
    printf '\351' >>"$dir/latin.txt"
    PYTHONPATH="$dir/with" refuse_tool "latin.txt: byte .* is not UTF-8" "$dir/latin.txt" \
        --format uint16 --output "$dir/named.bin" --tokenizer "$dir/tokenizer.json"
    export PYTHONPATH="$dir/with"
    make "a library's tokens" $shard "$dir/tokenizer.json" --eod-token '<end>'
    unset PYTHONPATH
    make "the same as numbers" "$dir/a.txt" --format uint16 --output "$dir/numbers.bin" \
        --tokenizer bytes --eod-token 300
    if cmp "$dir/named.bin" "$dir/numbers.bin"; then pass "a library's tokens are written"
    else fail "a library's tokens are written" "another file"
    fi

    # The trainer's side of it.
    refuse "does not say where documents end" "$trainer" --data "$dir/a.txt" --doc-mask
    refuse "outside the vocabulary of 256" "$trainer" --data "$dir/docs16.bin" --eod-token 300
    refuse "no token of bytes" "$trainer" --data "$dir/a.txt" --eod-token 300 --vocab 400
    refuse "says where documents end" "$trainer" --data "$dir/docs" --eod-token 0
    refuse "longer than a row" "$trainer" --data "$dir/sums.jsonl" --seq-len 8
    refuse "say different things" "$trainer" --data "$dir/a.txt" --data-format bytes \
        --token-dtype uint16
    refuse "needs --data-format bytes" "$trainer" --data "$dir/docs" --sample 5
    refuse "looks like" "$trainer" --data "$dir/a.txt" "$dir/docs16.bin"
    refuse "over the data in" "$trainer" --data "$dir/docs" --log "$dir/docs.idx"
}

finish
