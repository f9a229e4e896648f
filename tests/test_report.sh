#!/bin/sh
# Reports and traces: a page that needs nothing else, drawn by a browser without errors at the width
# of a phone and on paper; and counters whose highest sum is the peak that the books have.
#
# usage: tests/test_report.sh      from the project's root; builds build/train_llama
# Last line: "N passed, N failed". Without a headless Chromium its checks are named and left out.
. "$(dirname "$0")/shell.sh"

built build/train_llama
browser=
for tool in chromium chromium-browser google-chrome; do
    if command -v $tool >/dev/null 2>&1; then browser=$tool; break; fi
done
[ -n "$browser" ] || echo "skipped: drawing in a browser, because no chromium is here"

# The highest sum of the counters of rank $2 in the trace $1.
highest() {
    sed 's/},{"name"/}\n{"name"/g' "$1" | grep "\"name\":\"memory\",\"ph\":\"C\",\"pid\":$2," |
        sed 's/.*"args":{//; s/[a-z":}\]*//g' |
        awk -F, '{ s = 0; for (i = 1; i <= NF; i++) s += $i; if (s > m) m = s } END { printf "%d", m }'
}
peak_of() { # of rank $2 in the memory file $1
    tr '{' '\n' <"$1" | sed -n "s/^\"rank\":$2,\"peak_bytes\":\([0-9]*\).*/\1/p"
}
count() { grep -o "$1" "$2" | wc -l | tr -d ' '; }

small="--hidden 32 --heads 4 --kv-heads 2 --seq-len 32 --layers 4 --micro-batch-size 2"
# Lists of words, on purpose.
# shellcheck disable=SC2086
for device in meta cpu; do
    layout="$small --dp 2 --pp 2 --zero-stage 3 --micro-batches 4 --steps 5"
    [ $device = cpu ] && layout="$layout --data LICENSE"
    page=$dir/$device.html trace=$dir/$device.json
    if ! build/train_llama $layout --device $device --report "$page" --trace "$trace" \
        --memory-json "$dir/memory" >"$dir/out" 2>&1; then
        fail "$device" "$(cat "$dir/out")"
        continue
    fi
    for rank in 0 1 2 3; do
        check "$device: the trace's highest sum is the peak of rank $rank" \
            "$(highest "$trace" $rank), not $(peak_of "$dir/memory" $rank)" \
            [ "$(highest "$trace" $rank)" = "$(peak_of "$dir/memory" $rank)" ]
    done
    actions="$(count '"name":"forward"' "$trace") $(count '"name":"backward"' "$trace") \
$(count '"name":"optimizer"' "$trace")"
    check "$device: spans of 4 ranks and 4 micro-batches" "$actions" [ "$actions" = "16 16 4" ]
    check "$device: the page needs no other file" \
        "$(grep -o -E 'https?:|src=|@import|url\(|<link' "$page")" \
        sh -c "! grep -q -E 'https?:|src=|@import|url\(|<link' '$page'"
    mib=$(peak_of "$dir/memory" 0 | awk '{ k = $1 / 1024; if (k >= 1024) printf "peak %.2f MiB", k / 1024
        else printf "peak %.2f KiB", k }')
    check "$device: the page marks $mib" "$(grep -o 'peak [0-9.]* .iB' "$page")" \
        grep -q -F "$mib" "$page"
    check "$device: a drawing for each stage's memory" "$(count 'svg class="memory"' "$page")" \
        [ "$(count 'svg class="memory"' "$page")" = 2 ]
    check "$device: each stage's peak has its breakdown" "it has not" \
        [ "$(count 'At the peak' "$page")" = 2 ]
    check "$device: traffic by group" "it is missing" grep -q "zero gather" "$page"
    steps=$(sed -n 's/.*class=loss points="\([^"]*\)".*/\1/p' "$page" | wc -w | tr -d ' ')
    check "$device: losses" "$steps points" [ "$steps" = $([ $device = cpu ] && echo 5 || echo 0) ]

    if command -v python3 >/dev/null 2>&1; then
        check "$device: the trace is JSON" "it is not" \
            python3 -c "import json, sys; json.load(open(sys.argv[1]))" "$trace"
    else
        echo "skipped: whether the trace is JSON, because no python3 is here"
    fi
    [ -n "$browser" ] || continue
    headless="timeout 60 $browser --headless --no-sandbox --disable-gpu --enable-logging=stderr"
    $headless --window-size=360,800 --dump-dom "file://$page" >"$dir/dom" 2>"$dir/log"
    charts=$(count '<svg class=' "$page")
    check "$device: $browser draws $charts charts" "$(grep -o '<html[^>]*>' "$dir/dom")" \
        grep -q "data-charts=\"$charts\"" "$dir/dom"
    check "$device: nothing is wider than a phone" "$(grep -o 'data-overflow="[0-9]*"' "$dir/dom")" \
        grep -q 'data-overflow="0"' "$dir/dom"
    check "$device: no error in the page" "$(grep CONSOLE "$dir/log")" \
        sh -c "! grep -q CONSOLE '$dir/log'"
    $headless --print-to-pdf="$dir/page.pdf" "file://$page" >/dev/null 2>&1
    check "$device: it prints" "no PDF" grep -q -a '^%PDF' "$dir/page.pdf"
done

# What cannot be written is an error, not a loss.
# shellcheck disable=SC2086
for flag in --report --trace; do
    build/train_llama $small --device meta $flag "$dir/nowhere/file" >"$dir/out" 2>&1
    status=$?
    check "$flag into no directory is refused" "status $status" [ $status = 1 ]
    build/train_llama $small --device meta $flag "$dir/same" --memory-json "$dir/same" \
        >"$dir/out" 2>&1
    check "$flag over another output is refused" "$(cat "$dir/out")" grep -q "same file" "$dir/out"
done

finish
