#!/bin/sh
# The ladder of examples as a reader meets it: each is at most 150 lines, builds by the build line in
# its first comment without a warning, and prints, run by its run line, exactly what that comment
# shows. Neighbours teach by their difference, so what shall not differ is held to it.
#
# usage: tests/test_examples.sh      from the project's root; CC=... another compiler, default cc
# Last line: "N passed, N failed".
. "$(dirname "$0")/shell.sh"

mkdir -p build

# The first comment's line "   WORD:  ...", and the output it shows: lines indented by 6 from the run
# line to the lesson.
line_of() { sed -n -e "s/^   $1:  *//p" -e '/\*\//q' "$2"; }
shown_by() {
    awk '/^   What to learn/ || /\*\// { exit } seen && /^      / { print substr($0, 7) }
        /^   Run:/ { seen = 1 }' "$1"
}
# The program without its first comment.
code_of() { sed '1,/\*\//d' "$1"; }

# $CC, $limit, the build and the run line are commands with arguments: words meant to split.
# shellcheck disable=SC2086
build_example() { # FILE
    name=$(basename "$1" .c)
    build=$(line_of Build "$1")
    rm -f "build/$name"
    ${CC:-cc} ${build#cc } >"$dir/build.$name" 2>&1
}

# shellcheck disable=SC2086
check_example() { # FILE
    name=$(basename "$1" .c)
    lines=$(wc -l <"$1")
    if [ "$lines" -le 150 ]; then pass "$name has at most 150 lines"
    else fail "$name" "$lines lines, more than 150"; fi
    if head -n 1 "$1" | grep -q "^/\* $name\.c: "; then pass "$name says what it is"
    else fail "$name" "the first line does not begin with /* $name.c:"; fi

    build=$(line_of Build "$1")
    run=$(line_of Run "$1")
    expected="cc -std=c11 -O2 -I. $1 -o build/$name -lm -lpthread"
    if [ "$build" != "$expected" ]; then
        fail "$name" "the build line is '$build', not '$expected'"
        return
    fi
    if [ ! -x "build/$name" ]; then
        fail "$name" "does not build" "$dir/build.$name"
        return
    fi
    if [ -s "$dir/build.$name" ]; then fail "$name" "warnings" "$dir/build.$name"
    else pass "$name builds"; fi

    shown_by "$1" >"$dir/shown"
    $limit $run >"$dir/$name" 2>"$dir/err"
    status=$?
    if [ $status != 0 ]; then fail "$name" "exit status $status" "$dir/err"
    elif [ ! -s "$dir/shown" ]; then fail "$name" "its comment shows no output"
    elif ! diff "$dir/shown" "$dir/$name" >"$dir/diff"; then
        fail "$name" "prints (>) what its comment does not show (<)" "$dir/diff"
    else pass "$name prints what its comment shows"
    fi
}

# Two compilers at a time.
running=0
for file in examples/[0-9]*.c; do
    build_example "$file" &
    running=$((running + 1))
    if [ $((running % 2)) = 0 ]; then wait; fi
done
wait
for file in examples/[0-9]*.c; do check_example "$file"; done

# From one rank to ZeRO-3, and to a pipeline, the loss is the same at every step shown.
for name in 03_mlp_dp 04_mlp_zero1 05_mlp_zero2 06_mlp_zero3 09_mlp_pipeline; do
    for example in 02_mlp "$name"; do
        grep '^step' "$dir/$example" >"$dir/loss.$example" 2>/dev/null
    done
    if [ -s "$dir/loss.02_mlp" ] && cmp -s "$dir/loss.02_mlp" "$dir/loss.$name"; then
        pass "$name has the loss of 02_mlp"
    else
        fail "$name" "its loss is not that of 02_mlp"
    fi
done

# Neither does it depend on how the same model is cut: each loss shown, as often as there are cuts.
same_under_each() { # NAME CUTS EXPRESSION: sed's, for what is compared
    counts=$(sed -n "$3" "$dir/$1" 2>/dev/null | sort | uniq -c | awk '{ print $1 }' | sort -u)
    if [ "$counts" = "$2" ]; then pass "$1 has the same losses under each cut"
    else fail "$1" "its losses depend on the cut" "$dir/$1"; fi
}
same_under_each 10_tp_block 5 's/.*\(loss .*\)/\1/p'
same_under_each 11_llama_3d 2 '/^step/p'

# ZeRO's stages are one number apart.
for pair in "04_mlp_zero1 05_mlp_zero2" "05_mlp_zero2 06_mlp_zero3"; do
    code_of "examples/${pair% *}.c" | sed 's/config\.stage = [12];/config.stage = N;/' >"$dir/one"
    code_of "examples/${pair#* }.c" | sed 's/config\.stage = [23];/config.stage = N;/' >"$dir/two"
    if diff "$dir/one" "$dir/two" >"$dir/diff"; then pass "$pair: only the stage differs"
    else fail "$pair" "more than the stage differs" "$dir/diff"; fi
done

finish
