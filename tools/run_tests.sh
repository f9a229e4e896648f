#!/bin/sh
# Runs test programs, each under a time limit, and adds up what they report.
#
# usage: tools/run_tests.sh [-t SECONDS] [-l LOGDIR] [-p PREFIX] [-j N] [-a NAMES] PROGRAM...
#        -t  limit for each program, default 600 s; then it is killed and counts as failed
#        -l  where full outputs go, default build/logs
#        -p  command put before each program, for instance "setarch -R"
#        -j  programs at a time, default 1
#        -a  "NAME...": programs that run alone, when the others have ended, because time is what
#            they measure
#
# A program reports in cmocka's words ("[  PASSED  ] 3 test(s).") or by a line "N passed, N failed".
# One that crashes, hangs, was not built, or reports nothing counts as one failure. Names that end
# in .sh are run by sh. Results are printed in the order given, whichever program ends first; the
# output of build/plain/test_ops is in LOGDIR/plain-test_ops.log. The last line is "N passed, N
# failed"; the exit status is 0 if none failed.
set -u

limit=600 logs=build/logs prefix='' jobs=1 alone=''
while getopts t:l:p:j:a: option; do
    case $option in
    t) limit=$OPTARG ;;
    l) logs=$OPTARG ;;
    p) prefix=$OPTARG ;;
    j) jobs=$OPTARG ;;
    a) alone=$OPTARG ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
mkdir -p "$logs" || exit 1
case $jobs in
*[!0-9]* | '' | 0*) echo "error: -j $jobs: not a number of programs" >&2; exit 2 ;;
esac

# Which programs are taken, which run, and what those that ended exited with.
state=$(mktemp -d "${TMPDIR:-/tmp}/ft_run_tests.XXXXXX") || exit 1
stop() { # programs are in the background, where Ctrl-C does not reach them
    : >"$state/stop"
    # shellcheck disable=SC2046
    kill $(cat "$state"/*.running 2>/dev/null) 2>/dev/null
    wait
    exit 1
}
trap 'rm -rf "$state"' EXIT
trap stop HUP INT TERM

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

# build/plain/test_ops is plain/test_ops in what is printed, and plain-test_ops in names of files.
name_of() {
    name=${1#build/}
    case $name in
    asan/* | tsan/* | tests/* | /*) name=${name##*/} ;;
    esac
    echo "$name"
}
log_of() { echo "$logs/$(name_of "$1" | tr / -).log"; }

is_alone() {
    case " $alone " in
    *" $(basename "$1") "*) return 0 ;;
    esac
    return 1
}

# run_one INDEX PROGRAM: leaves the exit status and the seconds in the state.
run_one() {
    log=$(log_of "$2")
    begin=$(date +%s)
    case $2 in
    *.sh) run="sh $2" ;;
    */*) run=$2 ;;
    *) run=./$2 ;;
    esac
    if [ ! -e "$2" ]; then
        echo "not built" >"$log"
        status=127
    else
        # Words are meant to split here: guard, prefix and run are commands with arguments.
        # shellcheck disable=SC2086
        $guard $prefix $run >"$log" 2>&1 &
        echo $! >"$state/$1.running"
        wait $!
        status=$?
        rm -f "$state/$1.running"
    fi
    echo "$status $(($(date +%s) - begin))" >"$state/$1.ended"
}

# Takes programs that no other worker has taken, until there are none. mkdir is what decides.
work() {
    index=0
    for program in "$@"; do
        index=$((index + 1))
        [ -e "$state/stop" ] && return
        is_alone "$program" && continue
        mkdir "$state/$index" 2>/dev/null || continue
        run_one $index "$program"
        echo $index
    done
}

all_passed=0 all_failed=0
report() { # INDEX PROGRAM
    log=$(log_of "$2")
    read -r status seconds <"$state/$1.ended"
    # shellcheck disable=SC2046
    set -- "$2" $(count "$log")
    passed=$2 failed=$3 skipped=$4 note=
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
        "$verdict" "$(name_of "$1")" "$passed" "$failed" "$note" "$seconds"
    if [ "$verdict" = FAIL ]; then
        echo "---- end of $log"
        grep -v '^\[ RUN      \]\|^\[       OK \]' "$log" | tail -n 40
        echo "----"
    fi
}

# Reports, in order, every program that has ended and has none before it that has not.
next=1
report_ended() {
    at=0
    for candidate in "$@"; do
        at=$((at + 1))
        [ $at = $next ] || continue
        [ -e "$state/$at.ended" ] || return 0
        report $at "$candidate"
        next=$((next + 1))
    done
}

workers() {
    worker=0
    while [ $worker -lt "$jobs" ]; do
        work "$@" &
        worker=$((worker + 1))
    done
    wait
}

# A line comes out of the pipe when a program has ended; the pipe ends with the last worker.
if [ "$jobs" -gt 1 ] && mkfifo "$state/ended"; then
    workers "$@" >"$state/ended" &
    while read -r _; do report_ended "$@"; done <"$state/ended"
fi
index=0
for program in "$@"; do # those that run alone; with one job, all
    index=$((index + 1))
    [ -e "$state/$index.ended" ] || run_one $index "$program"
    report_ended "$@"
done
echo "$all_passed passed, $all_failed failed"
[ "$all_failed" = 0 ]
