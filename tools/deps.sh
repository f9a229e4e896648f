#!/bin/sh
# Sees to what `make test` needs: a C compiler, cmocka, OpenBLAS, cJSON and xxHash.
# Installs what is missing where it can (root and apt-get), says so, and otherwise names the
# packages and fails.
#
# usage: tools/deps.sh CC [PACKAGE...]    further packages to install with the rest
set -u

CC=${1:-cc}
[ $# -gt 0 ] && shift
here=$(dirname "$0")

compiles() {
    printf '#include <stdio.h>\nint main(void) { return 0; }\n' >"$1/probe.c" &&
        $CC "$1/probe.c" -o "$1/probe" >/dev/null 2>&1
}

dir=$(mktemp -d "${TMPDIR:-/tmp}/ft_deps.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM

# Libraries are looked for by compiling, so without a compiler all count as missing.
packages=
needs() {
    packages=
    compiles "$dir" || packages="build-essential"
    for name in $(sh "$here/features.sh" -m "$CC"); do
        packages="$packages lib$name-dev"
    done
    for package in "$@"; do
        dpkg -s "$package" >/dev/null 2>&1 || packages="$packages $package"
    done
    packages=${packages# }
}

needs "$@"
[ -z "$packages" ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing with apt-get: $packages"
    export DEBIAN_FRONTEND=noninteractive
    # Package lists may be absent (bare images) or old; a failed update alone is no reason to stop.
    apt-get update -qq >"$dir/log" 2>&1
    # shellcheck disable=SC2086
    if ! apt-get install -y -qq --no-install-recommends $packages >>"$dir/log" 2>&1; then
        tail -n 15 "$dir/log" >&2
        echo "error: apt-get could not install: $packages" >&2
        exit 1
    fi
    needs "$@"
    [ -z "$packages" ] && exit 0
    echo "error: still missing after apt-get: $packages" >&2
    exit 1
fi

echo "error: the tests need these packages (Debian's names): $packages" >&2
echo "       install them, or run make test as root where apt-get exists" >&2
exit 1
