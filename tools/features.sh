#!/bin/sh
# What the tests can use on this machine, as shell assignments:
#
#     FT_CFLAGS='-DFT_CBLAS -I... -DFT_CJSON ...'   FT_LIBS='-lopenblas -lcjson ...'
#     FT_PLAIN_CFLAGS, FT_PLAIN_LIBS                the same without CBLAS
#
# usage: tools/features.sh CC     prints them
#        tools/features.sh -m CC  prints the names of what is missing instead, one a line
#
# A library counts as present only when a program that calls it compiles, links and runs.
set -u

missing_only=0
if [ "${1:-}" = "-m" ]; then missing_only=1; shift; fi
CC=${1:-cc}

dir=$(mktemp -d "${TMPDIR:-/tmp}/ft_features.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM

# ask PACKAGE WHAT: pkg-config's answer, or nothing where pkg-config or the package is unknown.
ask() { pkg-config "$2" "$1" 2>/dev/null || true; }

# works CFLAGS LIBS: the program on standard input builds and runs.
works() {
    cat >"$dir/probe.c"
    # The flags are lists of words.
    # shellcheck disable=SC2086
    $CC $1 "$dir/probe.c" -o "$dir/probe" $2 >/dev/null 2>&1 && "$dir/probe" >/dev/null 2>&1
}

cflags='' libs='' blas_cflags='' blas_libs='' missing=''
found() { cflags="$cflags $1"; libs="$libs $2"; }

probe_cblas='#include <cblas.h>
int main(void) {
    float a = 2, b = 3, c = 1;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1, 1, 1, 1, &a, 1, &b, 1, 0, &c, 1);
    return c == 6 ? 0 : 1;
}'
for lib in "$(ask openblas --libs)" -lopenblas -lcblas; do
    [ -n "$lib" ] || continue
    inc=$(ask openblas --cflags)
    if printf '%s\n' "$probe_cblas" | works "$inc" "$lib"; then
        blas_cflags="-DFT_CBLAS $inc" blas_libs=$lib
        break
    fi
done
[ -n "$blas_cflags" ] || missing="$missing openblas"

if printf '%s\n' '#include <cjson/cJSON.h>
int main(void) { cJSON_Delete(cJSON_Parse("{}")); return 0; }' | works "" -lcjson; then
    found -DFT_CJSON -lcjson
else
    missing="$missing cjson"
fi

if printf '%s\n' '#include <xxhash.h>
int main(void) { return XXH64("", 0, 0) == 0xEF46DB3751D8E999ULL ? 0 : 1; }' |
    works "" -lxxhash; then
    found -DFT_XXHASH -lxxhash
else
    missing="$missing xxhash"
fi

if ! printf '%s\n' '#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
int main(void) { assert_true(1); return 0; }' | works "" -lcmocka; then
    missing="$missing cmocka"
fi

if [ "$missing_only" = 1 ]; then
    for name in $missing; do printf '%s\n' "$name"; done
else
    printf "FT_CFLAGS='%s'\nFT_LIBS='%s'\n" "$blas_cflags$cflags" "$blas_libs$libs"
    printf "FT_PLAIN_CFLAGS='%s'\nFT_PLAIN_LIBS='%s'\n" "$cflags" "$libs"
fi
