#!/bin/sh
# Compile checks, with every compiler of gcc, clang, g++, clang++ and nvcc that is here:
#
#   - each header alone, with its bases only: declarations, and with its implementation
#   - each header twice in one unit, and implemented after it was included without the macro
#   - two units, the implementation in one language and the user in another, linked and run
#   - a missing base is an #error that names what to include
#   - FT_CBLAS, FT_CJSON, FT_XXHASH on and off; FT_API=static
#   - the implementation exports ft_* and ftk_* and nothing else
#   - the trainer and the user's program in C11 and in C++17, the other examples in C11
#   - with the CUDA Toolkit: the implementation with FT_CUDA as C, C++ and by nvcc, the device kernels
#     for Ampere, Hopper and as PTX, and the trainer linked with them
#   - no tabs, no blanks at the end of a line
#
# All with warnings as errors. Run from the root of the repository; it writes to build/compile. JOBS=N
# runs N checks at a time, default: as many as there are cores.
# Last line: "N passed, N failed". Compilers that are not here are named and left out.
# Lists of words are meant to split throughout.
# shellcheck disable=SC2086,SC2046
set -u

out=build/compile
rm -rf "$out"
mkdir -p "$out" || exit 1

# What each header builds on, and in this order they are included.
bases() {
    case $1 in
    femtotron_llama.h) echo femtotron.h femtotron_zero.h femtotron_tp.h ;;
    femtotron_?*.h) echo femtotron.h ;;
    esac
}
headers=''
for header in femtotron.h femtotron_zero.h femtotron_tp.h femtotron_pp.h femtotron_llama.h \
    femtotron_io.h; do
    [ -f $header ] && headers="$headers $header"
done
for header in femtotron*.h; do
    case "$headers " in
    *" $header "*) ;;
    *)
        echo "error: tests/compile/check.sh does not know what $header builds on"
        exit 1 ;;
    esac
done

warnings="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wvla -Werror"
passed=0 failed=0 started=0 settled=0 running=''
jobs=${JOBS:-$(nproc 2>/dev/null || echo 1)}

# check NAME COMMAND...: the command succeeds. It starts now, beside others; what a command leaves for
# itself alone has $tmp in its name. What later checks need is there after `settle`.
check() {
    started=$((started + 1))
    tmp=$out/$started
    if [ "$(echo $running | wc -w)" -ge "$jobs" ]; then
        wait "${running%% *}"
        running=${running#* }
    fi
    {
        label=$1
        shift
        echo "$label|     $*" >"$tmp.check"
        if "$@" >"$tmp.log" 2>&1; then echo ok >"$tmp.verdict"; fi
    } &
    running="$running$! "
}

# Waits for the checks so far, and prints them in order; the output of those that failed too.
settle() {
    wait
    running=
    while [ $settled -lt $started ]; do
        settled=$((settled + 1))
        if [ -e "$out/$settled.verdict" ]; then
            passed=$((passed + 1))
            printf 'ok   %s\n' "$(cut -d'|' -f1 "$out/$settled.check")"
        else
            failed=$((failed + 1))
            printf 'FAIL %s\n' "$(tr '|' '\n' <"$out/$settled.check")"
            head -n 15 "$out/$settled.log"
        fi
    done
}

have() { command -v "$1" >/dev/null 2>&1; }

# The compilers that are here, by language.
c_compilers='' cpp_compilers='' nvcc=''
for tool in gcc clang; do
    if have $tool; then c_compilers="$c_compilers $tool"; else echo "skipped: no $tool"; fi
done
for tool in g++ clang++; do
    if have $tool; then cpp_compilers="$cpp_compilers $tool"; else echo "skipped: no $tool"; fi
done
for tool in nvcc /usr/local/cuda/bin/nvcc; do
    if [ -z "$nvcc" ] && have $tool; then nvcc=$tool; fi
done
[ -n "$nvcc" ] || echo "skipped: no nvcc"

# compile COMPILER SOURCE OBJECT FLAGS...: in the language that the compiler's name says; the object
# "-" is for no one else. nvcc takes
# .cu as C++ and .c as C; what it generates from .cu is not pedantic C++.
compile() {
    by=$1 source=$2 object=$3
    shift 3
    [ "$object" = - ] && object=$tmp.o
    case $by in
    gcc | clang | cc)
        $by -std=c11 $warnings -I. "$@" -c -x c "$source" -o "$object" ;;
    g++ | clang++)
        $by -std=c++17 $warnings -I. "$@" -c -x c++ "$source" -o "$object" ;;
    nvcc-cu)
        $nvcc -std=c++17 -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wshadow,-Werror -I. "$@" \
            -c -x cu "$source" -o "$object" ;;
    nvcc-c)
        # nvcc runs the host's C compiler on .c files.
        $nvcc -Xcompiler -std=c11 -Xcompiler "$(echo $warnings | tr ' ' ',')" -I. "$@" \
            -c -x c "$source" -o "$object" ;;
    esac
}

all_compilers="$c_compilers $cpp_compilers"
[ -n "$nvcc" ] && all_compilers="$all_compilers nvcc-cu nvcc-c"

include_lines() {
    for file in "$@"; do printf '#include "%s"\n' "$file"; done
}

# ------------------------------------------------------------------------- each header by itself

# Some translation unit must define something: a pedantic C unit may not be empty.
trailer='int ft_compile_check(void);
int ft_compile_check(void) { return 0; }'

for header in $headers; do
    name=$(basename "$header" .h)
    based=$(bases "$header")
    {
        include_lines $based "$header" $based "$header"
        echo "$trailer"
    } >"$out/${name}_twice.c"
    {
        echo '#define FEMTOTRON_IMPLEMENTATION'
        include_lines $based "$header" $based "$header"
    } >"$out/${name}_impl.c"
    {
        include_lines $based "$header"
        cat "$out/${name}_impl.c"
    } >"$out/${name}_later.c"
    for compiler in $all_compilers; do
        check "$header included twice, $compiler" \
            compile $compiler "$out/${name}_twice.c" -
        check "$header implemented alone, $compiler" \
            compile $compiler "$out/${name}_impl.c" -
    done
    # Where system headers come before the implementation, strict C11 needs POSIX asked for.
    for compiler in $c_compilers $cpp_compilers; do
        check "$header implemented after a plain include, $compiler" \
            compile $compiler "$out/${name}_later.c" - -D_POSIX_C_SOURCE=200809L
    done
done

# ------------------------------------------------------------------------------- a base is missing

# refused COMPILER SOURCE BASE: does not compile, and the #error names the base to include.
refused() {
    if compile "$1" "$2" - >"$tmp.refused" 2>&1; then
        echo "compiled, although $3 is missing"
        return 1
    fi
    cat "$tmp.refused"
    grep '#error\|error:' "$tmp.refused" | grep include | grep -q "$3"
}

for header in $headers; do
    given=
    for missing in $(bases "$header"); do
        name=$(basename "$header" .h)_without_$(basename "$missing" .h)
        { include_lines $given "$header"; echo "$trailer"; } >"$out/$name.c"
        for compiler in $c_compilers $cpp_compilers; do
            check "$header says that $missing is missing, $compiler" \
                refused $compiler "$out/$name.c" "$missing"
        done
        given="$given $missing"
    done
done

# ------------------------------------------------------------------- the whole library, its symbols

{ echo '#define FEMTOTRON_IMPLEMENTATION'; include_lines $headers; } >"$out/impl.c"

# The global symbols that an object defines. C++ adds weak copies of inline functions of its
# standard library, which belong to no one.
exported() {
    nm -g --defined-only "$1" | awk 'NF == 3 && !($2 == "W" && $3 ~ /^_ZSt/) { print $3 }'
}

exports_only_ft() {
    exported "$1" >"$tmp.symbols"
    grep -q '^ft_launch$' "$tmp.symbols" || { echo "ft_launch is not exported"; return 1; }
    ! grep -v -e '^ft_' -e '^ftk_' "$tmp.symbols"
}

exports_nothing() { ! exported "$1" | grep .; }

# What the machine has of CBLAS, cJSON and xxHash, as flags.
features_of() {
    sh tools/features.sh $1 | sed -n "s/^FT_CFLAGS='\(.*\)'/\1/p"
}
features=$(features_of $(echo $all_compilers | cut -d' ' -f1))

# Optimised, compilers warn of more. nvcc would have the host's compiler do that work again.
for compiler in $all_compilers; do
    optimised=' -O2,'
    case $compiler in nvcc*) optimised= ;; esac
    check "all headers implemented,$optimised $compiler" \
        compile $compiler "$out/impl.c" "$out/impl-$compiler.o" ${optimised%,}
done
for compiler in $c_compilers $cpp_compilers; do
    check "FT_API=static compiles, $compiler" compile $compiler "$out/impl.c" \
        "$out/static-$compiler.o" -DFT_API=static -Wno-unused-function
    check "with$features, $compiler" \
        compile $compiler "$out/impl.c" "$out/features-$compiler.o" $features
done
settle
for compiler in $c_compilers $cpp_compilers; do
    check "only ft_ symbols exported, $compiler" exports_only_ft "$out/impl-$compiler.o"
    check "FT_API=static exports nothing, $compiler" exports_nothing "$out/static-$compiler.o"
    check "only ft_ symbols exported with features, $compiler" \
        exports_only_ft "$out/features-$compiler.o"
done
for compiler in $c_compilers; do
    for feature in FT_CBLAS FT_CJSON FT_XXHASH; do
        case " $features " in
        *" -D$feature "*)
            check "$feature alone, $compiler" compile $compiler "$out/impl.c" - \
                -D$feature $(echo "$features" | tr ' ' '\n' | grep '^-I') ;;
        *) echo "skipped: $feature, its library is not installed" ;;
        esac
    done
done

# --------------------------------------------------------------------------- two translation units

# linked IMPLEMENTER USER: the user's program is linked by its own language's driver and runs.
linked() {
    case "$1 $2" in
    *nvcc-cu*) link=$nvcc ;;
    *++*) link=$(echo "$1 $2" | tr ' ' '\n' | grep '++' | tail -n 1) ;;
    *nvcc-c*) link=$nvcc ;;
    *) link=$2 ;;
    esac
    $link "$out/impl-$1.o" "$out/use-$2.o" -o "$tmp.linked" -lm -lpthread && "$tmp.linked"
}

for compiler in $all_compilers; do
    check "a user's program, $compiler" compile $compiler tests/compile/use.c "$out/use-$compiler.o"
done
settle
for implementer in $all_compilers; do
    for user in $all_compilers; do
        check "implementation by $implementer, user by $user" linked $implementer $user
    done
done

# Every header has a macro of its own: the implementations in as many units, each compiled by
# another compiler than the one before.
objects='' others="$c_compilers $cpp_compilers"
for header in $headers; do
    name=$(basename "$header" .h)
    part=$(echo "${name#femtotron}" | tr -d _ | tr '[:lower:]' '[:upper:]')
    {
        echo "#define FEMTOTRON_${part:-CORE}_IMPLEMENTATION"
        include_lines $(bases "$header") "$header"
    } >"$out/${name}_part.c"
    set -- $others
    compiler=$1
    shift
    others="$* $compiler"
    check "$header, its own macro, $compiler" \
        compile $compiler "$out/${name}_part.c" "$out/${name}_part.o"
    objects="$objects $out/${name}_part.o"
done
settle
linker=$(echo "$cpp_compilers $c_compilers" | awk '{ print $1 }')
parts_linked() {
    $linker $objects "$out/use-$user.o" -o "$tmp.linked" -lm -lpthread && "$tmp.linked"
}
for user in $c_compilers $cpp_compilers; do
    check "every implementation in a unit of its own, user by $user" parts_linked
done

# --------------------------------------------------------------------------------------- examples

# The trainer is C and C++; the ladder of small programs is plain C.
for example in examples/*.c; do
    [ -f "$example" ] || continue
    compilers=$c_compilers
    [ "$example" = examples/train_llama.c ] && compilers=$all_compilers
    for compiler in $compilers; do
        check "$example, $compiler" compile $compiler "$example" -
    done
done

# --------------------------------------------------------------------------------------------- GPU

# Nothing here runs on a GPU: it compiles and links. CUDA's own headers are not pedantic.
{
    printf '#define FEMTOTRON_IMPLEMENTATION\n'
    include_lines $headers
    echo "$trailer"
} >"$out/gpu.c"
gpu_implementation() {
    case $1 in
    nvcc-cu) compile nvcc-cu "$out/gpu.c" - -DFT_CUDA ;;
    nvcc-c) $nvcc -DFT_CUDA -I. -Xcompiler -Wall,-Wextra,-Werror -c -x c "$out/gpu.c" -o "$tmp.o" ;;
    *++) $1 -std=c++17 -Wall -Wextra -Wshadow -Werror -DFT_CUDA -I. -isystem "$cuda" -c -x c++ \
            "$out/gpu.c" -o "$tmp.o" ;;
    *) $1 -std=c11 -Wall -Wextra -Wshadow -Wconversion -Wvla -Werror -DFT_CUDA -I. -isystem "$cuda" \
            -c "$out/gpu.c" -o "$tmp.o" ;;
    esac
}
gpu_kernels() { # for every target at once
    $nvcc -O3 --threads 2 -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror -I. \
        -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a \
        -gencode arch=compute_90,code=compute_90 -c femtotron_kernels.cu -o "$out/kernels.o"
}
gpu_linked() {
    $nvcc -DFT_CUDA -I. examples/train_llama.c "$out/kernels.o" -o "$out/train_llama_cuda" \
        -lcublasLt && "$out/train_llama_cuda" --help
}
if [ -n "$nvcc" ]; then
    cuda=$(dirname "$(dirname "$(command -v $nvcc)")")/include
    for compiler in gcc g++ nvcc-cu; do
        [ $compiler != nvcc-cu ] && ! have $compiler && continue
        check "FT_CUDA, $compiler" gpu_implementation $compiler
    done
    check "femtotron_kernels.cu for sm_80, sm_90a and as PTX" gpu_kernels
    settle
    check "the trainer with FT_CUDA" gpu_linked
fi

# ------------------------------------------------------------------------------------------ layout

# What a machine can see of style: no tabs, no blanks at the end of a line.
layout() {
    awk -v tab="$(printf '\t')" '
        index($0, tab) || / $/ { print FILENAME ":" FNR ": " $0; bad = 1 }
        END { exit bad }' "$1"
}
for file in $headers *.cu examples/*.c tests/*.c tests/*/*.c tests/*/*.cu; do
    [ -f "$file" ] && check "layout of $file" layout "$file"
done
settle

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
