#!/bin/sh
# Runs fuzzers (tests/fuzz), some at a time, and adds up what they find.
#
# usage: tools/fuzz.sh [-s SECONDS] [-j N] FUZZER...    SECONDS for all together, default 60; N at a
#                                                      time, default 2
#        tools/fuzz.sh -p                              only: can $CC build fuzzers? Installs what it
#                                                      lacks where it can (root and apt-get)
#
# Inputs that reach new code are kept in build/fuzz/corpus/NAME, from where the next run goes on. An
# input that a fuzzer dies of is left as build/fuzz/found/NAME-crash-..., and its path printed; run
# FUZZER PATH to see it again. Last line: "N passed, N failed", a fuzzer each.
set -u

seconds=60 jobs=2 probe=0 CC=${CC:-clang}
while getopts s:j:p option; do
    case $option in
    s) seconds=$OPTARG ;;
    j) jobs=$OPTARG ;;
    p) probe=1 ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))

has_fuzzer() { # links, and runs
    probe_dir=$(mktemp -d "${TMPDIR:-/tmp}/ft_fuzz.XXXXXX") || exit 1
    printf '%s\n' '#include <stdint.h>' '#include <stddef.h>' \
        'int LLVMFuzzerTestOneInput(const uint8_t *d, size_t n) { return d == NULL && n; }' \
        >"$probe_dir/probe.c"
    $CC -fsanitize=fuzzer,address,undefined "$probe_dir/probe.c" -o "$probe_dir/probe" \
        >/dev/null 2>&1 && "$probe_dir/probe" -runs=1 >/dev/null 2>&1
    has=$?
    rm -rf "$probe_dir"
    return $has
}

if [ $probe = 1 ]; then
    has_fuzzer && exit 0
    # Debian and Ubuntu have libFuzzer in a package named after clang's version.
    version=$($CC --version 2>/dev/null | sed -n 's/.*version \([0-9]*\)\..*/\1/p' | head -n 1)
    packages=${version:+libclang-rt-$version-dev}
    packages=${packages:-clang}
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "installing with apt-get: $packages"
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            $packages >/dev/null 2>&1
        has_fuzzer && exit 0
    fi
    echo "error: $CC cannot build fuzzers here (-fsanitize=fuzzer); it needs $packages" >&2
    echo "0 passed, 1 failed"
    exit 1
fi
if [ $# = 0 ]; then
    echo "error: no fuzzer is named" >&2
    exit 2
fi

each=$((seconds * jobs / $#))
[ $each -ge 1 ] || each=1
logs=build/logs/fuzz
mkdir -p "$logs" build/fuzz/found
sh tests/fuzz/seeds.sh build/fuzz/seeds || exit 1
# The words that the parsers look for.
sed -n 's/[^"]*"\([a-z][a-z0-9_-]*\)"/\1\n/gp' femtotron_io.h examples/train_llama.c |
    grep -x '[a-z][a-z0-9_-]*' | sort -u | sed 's/.*/"&"/' >build/fuzz/words.dict
export ASAN_OPTIONS="detect_leaks=1:allocator_may_return_null=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"

fuzz() { # FUZZER
    name=$(basename "$1")
    name=${name#fuzz_}
    mkdir -p "build/fuzz/corpus/$name"
    "$1" -max_total_time=$each -timeout=10 -rss_limit_mb=1024 -max_len=4096 \
        -print_final_stats=1 -dict=build/fuzz/words.dict \
        -artifact_prefix="build/fuzz/found/$name-" \
        "build/fuzz/corpus/$name" "build/fuzz/seeds/$name" >"$logs/$name.log" 2>&1
    echo $? >"$logs/$name.status"
}

# Worker k takes fuzzers k, k + jobs, ...
worker=0
while [ $worker -lt "$jobs" ]; do
    {
        at=0
        for fuzzer in "$@"; do
            [ $((at % jobs)) = $worker ] && fuzz "$fuzzer"
            at=$((at + 1))
        done
    } &
    worker=$((worker + 1))
done
wait

passed=0 failed=0
for fuzzer in "$@"; do
    name=$(basename "$fuzzer")
    log=$logs/${name#fuzz_}.log
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    if [ "$(cat "${log%.log}.status")" = 0 ] && [ "${runs:-0}" -gt 0 ]; then
        passed=$((passed + 1))
        printf 'ok   %-28s %s inputs, %d s\n' "$name" "$runs" $each
    else
        failed=$((failed + 1))
        printf 'FAIL %s\n---- end of %s\n' "$name" "$log"
        grep -v '^#[0-9]*	\(NEW\|REDUCE\|pulse\)' "$log" | tail -n 30
        echo "----"
        sed -n 's/.*Test unit written to /the input: /p' "$log"
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
