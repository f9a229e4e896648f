#!/bin/sh
# Runs test programs one after another, each under a time limit, and adds up what they report.
#
# usage: tools/run_tests.sh [-t SECONDS] [-l LOGDIR] [-p PREFIX] PROGRAM...
#        -t  limit for each program, default 600 s; then it is killed and counts as failed
#        -l  where full outputs go, default build/logs
#        -p  command put before each program, for instance "setarch -R"
#
# A program reports in cmocka's words ("[  PASSED  ] 3 test(s).") or by a line "N passed, N failed".
# One that crashes, hangs, was not built, or reports nothing counts as one failure. Names that end
# in .sh are run by sh. The last line is "N passed, N failed"; the exit status is 0 if none failed.
set -u

limit=600 logs=build/logs prefix=
while getopts t:l:p: option; do
    case $option in
    t) limit=$OPTARG ;;
    l) logs=$OPTARG ;;
    p) prefix=$OPTARG ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
mkdir -p "$logs" || exit 1

# Sums of a log: "passed failed skipped".
count() {
    awk '
        /^\[  PASSED  \] +[0-9]+ test\(s\)/ { passed += $4 }
        /^\[  FAILED  \] +[0-9]+ test\(s\)/ { failed += $4 }
        /^\[  SKIPPED \] +[0-9]+ test\(s\)/ { skipped += $4 }
        /^[0-9]+ passed, [0-9]+ failed/ { passed += $1; failed += $3 }
        END { print passed + 0, failed + 0, skipped + 0 }' "$1"
}

guard=
command -v timeout >/dev/null 2>&1 && guard="timeout -k 10 $limit"

all_passed=0 all_failed=0
for program in "$@"; do
    name=$(basename "$program")
    log=$logs/$name.log
    begin=$(date +%s)
    case $program in
    *.sh) run="sh $program" ;;
    */*) run=$program ;;
    *) run=./$program ;;
    esac
    if [ ! -e "$program" ]; then
        echo "not built" >"$log"
        status=127
    else
        # Words are meant to split here: guard, prefix and run are commands with arguments.
        # shellcheck disable=SC2086
        $guard $prefix $run >"$log" 2>&1
        status=$?
    fi
    seconds=$(($(date +%s) - begin))
    # shellcheck disable=SC2046
    set -- $(count "$log")
    passed=$1 failed=$2 skipped=$3 note=
    [ "$skipped" != 0 ] && note=", $skipped skipped"
    if [ $((passed + failed + skipped)) = 0 ] && [ "$status" = 0 ]; then
        status=1
        note=" (reported no counts)"
    fi
    if [ "$status" != 0 ] && [ "$failed" = 0 ]; then
        failed=1
        case $status in
        124 | 137) note="$note (killed after $limit s)" ;;
        127) note="$note (not built)" ;;
        *) note="$note (exit status $status)" ;;
        esac
    fi
    all_passed=$((all_passed + passed))
    all_failed=$((all_failed + failed))
    verdict=ok
    [ "$failed" != 0 ] && verdict=FAIL
    printf '%-4s %-28s %4d passed, %d failed%s, %d s\n' \
        "$verdict" "$name" "$passed" "$failed" "$note" "$seconds"
    if [ "$verdict" = FAIL ]; then
        echo "---- end of $log"
        grep -v '^\[ RUN      \]\|^\[       OK \]' "$log" | tail -n 40
        echo "----"
    fi
done
echo "$all_passed passed, $all_failed failed"
[ "$all_failed" = 0 ]
