#!/usr/bin/env bash
# dspark.h stands alone: it compiles by itself, and twice in a row, as every C and C++ that a host may
# use, without a warning, with each compiler that is there.
# usage: header.sh ROOT CC
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
root=$1
cc=$2
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

cat > "$tmp/alone.c" <<'C'
#include <dspark/dspark.h>
#include <dspark/dspark.h>
dspark_status use(dspark_error *err);
dspark_status use(dspark_error *err)
{
    dspark_model_opts opts;
    dspark_model *model;
    dspark_model_opts_init(&opts);
    return dspark_model_open(&model, "dir", &opts, err);
}
C
cp "$tmp/alone.c" "$tmp/alone.cpp"

flags=(-fsyntax-only -Wall -Wextra -Wpedantic -Wshadow -Wundef -Werror "-I$root/include")
n=0
try() { # COMPILER LANGUAGE-STANDARD FILE
    if "$1" "-std=$2" "${flags[@]}" "$3" > "$tmp/out" 2>&1; then
        n=$((n + 1))
        printf '%s -std=%s\n' "$1" "$2"
    else
        fail "$1 -std=$2: $(head -5 "$tmp/out")"
    fi
}

declare -A seen=()
for c in "$cc" gcc clang; do
    path=$(command -v "$c" || true)
    [[ -n $path && -z ${seen[$(readlink -f "$path")]-} ]] || continue
    seen[$(readlink -f "$path")]=1
    for std in c99 c11 c17; do try "$c" "$std" "$tmp/alone.c"; done
done
cxx=0
for c in g++ clang++; do
    # clang++ is often there without the C++ compiler's own parts; it must take an empty file at least.
    if ! "$c" -fsyntax-only -x c++ /dev/null 2> /dev/null; then continue; fi
    for std in c++11 c++17; do try "$c" "$std" "$tmp/alone.cpp"; done
    cxx=1
done
((cxx)) || printf 'no C++ compiler here: C++ not tried\n'
((n > 0)) || fail 'no compiler found'

# The version macros agree with the project's version.
project=$(sed -nE 's/^project\(dspark VERSION ([0-9.]+).*/\1/p' "$root/CMakeLists.txt")
macro() { sed -nE "s/^#define DSPARK_VERSION_$1 \"?([0-9.]+)\"?$/\1/p" "$root/include/dspark/dspark.h"; }
[[ $(macro STRING) == "$project" ]] || fail "dspark.h says $(macro STRING), CMakeLists.txt $project"
[[ $(macro MAJOR).$(macro MINOR).$(macro PATCH) == "$project" ]] || fail 'version macros disagree'
finish "$n combinations of compiler and standard"
