# shell.sh: what the shell tests share: a directory of their own, a time limit, the counts.
#
#     . "$(dirname "$0")/shell.sh"        at the beginning of tests/test_NAME.sh
#     finish                              at its end: the last line, "N passed, N failed", which
#                                         tools/run_tests.sh counts, and the exit status
#
# Sets $dir, which is deleted at the end; $limit, to be put before a command that might hang (words
# meant to split, empty without timeout); and $trainer, which $FT_TRAINER names. With in_memory=1
# set before, $dir is in memory where there is such a file system: syncing costs nothing there.

# Variables are the tests'.
# shellcheck shell=sh disable=SC2034
set -u

trainer=${FT_TRAINER:-build/train_llama}
dir=${TMPDIR:-/tmp}
[ "${in_memory:-0}" = 1 ] && [ -d /dev/shm ] && [ -w /dev/shm ] && dir=/dev/shm
dir=$(mktemp -d "$dir/ft_$(basename "$0" .sh).XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
limit=
command -v timeout >/dev/null 2>&1 && limit="timeout -k 5 120"

passed=0 failed=0
pass() { passed=$((passed + 1)); printf 'ok   %s\n' "$1"; }
# fail NAME WHY [FILE]: with the file's first lines, or those of standard error and the last of
# standard output, where the test keeps them.
fail() {
    failed=$((failed + 1))
    printf 'FAIL %s: %s\n' "$1" "$2"
    if [ $# -gt 2 ]; then
        head -n 20 "$3"
        return
    fi
    head -n 5 "$dir/err" 2>/dev/null
    tail -n 3 "$dir/out" 2>/dev/null
}

# check NAME WHY CONDITION...
check() {
    name=$1 why=$2
    shift 2
    if "$@"; then pass "$name"; else fail "$name" "$why"; fi
}

finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" = 0 ]
    exit
}

# The trainer, its output in $dir/out and $dir/err.
run() { $limit "$trainer" "$@" >"$dir/out" 2>"$dir/err"; }

# built TARGET...: or the test ends here.
built() {
    make --no-print-directory "$@" >"$dir/make" 2>&1 && return
    cat "$dir/make"
    failed=1
    finish
}

# counting N: text of N lines, of which a small model can learn something.
counting() {
    i=0
    while [ $i -lt "$1" ]; do
        echo "the number $i is followed by $((i + 1)), said the ant"
        i=$((i + 1))
    done
}
