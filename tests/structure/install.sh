#!/usr/bin/env bash
# Installs into a temporary prefix and uses the result as a stranger would: through pkg-config (shared
# and static) and through find_package(dspark). Each program must run; each link of an installed page must
# lead to an installed file.
# usage: install.sh ROOT BUILD_DIR TINY_CHECKPOINT CMAKE CC
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
root=$1
build=$2
tiny=$3
cmake=$4
cc=$5
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
prefix=$tmp/prefix

"$cmake" --install "$build" --prefix "$prefix" > "$tmp/log" 2>&1 || { cat "$tmp/log"; fail 'install'; finish; }
for f in include/dspark/dspark.h bin/dspark share/man/man1/dspark.1 share/doc/dspark/docs/numerics.md; do
    [[ -e $prefix/$f ]] || fail "$f was not installed"
done
while IFS= read -r page; do
    while IFS= read -r link; do
        [[ -e $(dirname "$page")/${link%%#*} ]] ||
            fail "${page#"$prefix/"}: the link $link leads to nothing that was installed"
    done < <(links_of "$page")
done < <(find "$prefix" -name '*.md')
pc=$(find "$prefix" -name dspark.pc)
[[ -n $pc ]] || { fail 'dspark.pc was not installed'; finish; }
libdir=$(dirname "$(dirname "$pc")")
[[ -e $libdir/libdspark.so && -e $libdir/libdspark.a ]] || fail "no libraries in $libdir"
if grep -rIlF -e "$root" -e "$build" "$prefix/include" "$pc" "$libdir/cmake"; then
    fail 'an installed text file names the build tree'
fi
"$prefix/bin/dspark" --version > "$tmp/out" || fail 'the installed command does not run'

export PKG_CONFIG_PATH=$libdir/pkgconfig
run() { # NAME PROGRAM
    "$2" "$tiny" > "$tmp/out" 2>&1 || fail "$1 does not run: $(head -3 "$tmp/out")"
    [[ -s $tmp/out ]] || fail "$1 said nothing"
    cp "$tmp/out" "$tmp/$1.out"
}
read -ra flags <<< "$(pkg-config --cflags --libs dspark)"
"$cc" -std=c11 -Wall -Werror "$root/examples/minimal.c" -o "$tmp/shared" "${flags[@]}" "-Wl,-rpath,$libdir"
run shared "$tmp/shared"
read -ra cflags <<< "$(pkg-config --cflags dspark)"
read -ra libs <<< "$(pkg-config --static --libs dspark)"
"$cc" -std=c11 "${cflags[@]}" "$root/examples/minimal.c" -o "$tmp/static" \
    "${libs[@]/#-ldspark/-l:libdspark.a}"
if ldd "$tmp/static" | grep -q libdspark; then fail 'the static program needs libdspark.so'; fi
run static "$tmp/static"

mkdir "$tmp/user"
cat > "$tmp/user/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.16)
project(user LANGUAGES C)
find_package(dspark 0.1 REQUIRED)
add_executable(viashared $root/examples/minimal.c)
target_link_libraries(viashared PRIVATE dspark::dspark)
add_executable(viastatic $root/examples/minimal.c)
target_link_libraries(viastatic PRIVATE dspark::dspark_static)
CMAKE
if "$cmake" -S "$tmp/user" -B "$tmp/user/build" "-DCMAKE_C_COMPILER=$cc" "-DCMAKE_PREFIX_PATH=$prefix" \
    > "$tmp/log" 2>&1 && "$cmake" --build "$tmp/user/build" >> "$tmp/log" 2>&1; then
    run viashared "$tmp/user/build/viashared"
    run viastatic "$tmp/user/build/viastatic"
else
    tail -20 "$tmp/log"
    fail 'find_package(dspark)'
fi
for other in static viashared viastatic; do
    cmp -s "$tmp/shared.out" "$tmp/$other.out" || fail "$other answers differently from shared"
done
finish 'pkg-config and find_package, shared and static'
