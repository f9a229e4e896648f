#!/bin/sh
# Runs a command under the options that a sanitizer needs on this machine, and says what it had to
# change.
#
# usage: tools/sanitize.sh asan|tsan CC COMMAND...
set -u

kind=$1 CC=$2
shift 2
dir=$(mktemp -d "${TMPDIR:-/tmp}/ft_sanitize.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
printf 'int main(void) { return 0; }\n' >"$dir/probe.c"

if [ "$kind" = asan ]; then
    flags=-fsanitize=address,undefined
    export ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1:${ASAN_OPTIONS:-}"
    export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
    # The shell tests run this trainer instead.
    export FT_TRAINER=build/asan/train_llama
else
    flags=-fsanitize=thread
    export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:${TSAN_OPTIONS:-}"
fi

if ! $CC $flags "$dir/probe.c" -o "$dir/probe" 2>"$dir/log"; then
    cat "$dir/log" >&2
    echo "error: $CC has no $flags here (clang wants libclang-rt-*-dev)" >&2
    echo "0 passed, 1 failed"
    exit 1
fi
if ! "$dir/probe" >"$dir/log" 2>&1; then
    if [ "$kind" = asan ] && ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0" "$dir/probe" \
        >/dev/null 2>&1; then
        echo "note: LeakSanitizer cannot run here (no ptrace?); leaks are not looked for"
        export ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0"
    elif setarch -R "$dir/probe" >/dev/null 2>&1; then
        echo "note: the sanitizer needs address randomisation off here: setarch -R"
        setarch -R "$@"
        exit $?
    else
        cat "$dir/log" >&2
        echo "error: programs built with $flags do not run here" >&2
        echo "0 passed, 1 failed"
        exit 1
    fi
fi
"$@"
