#!/usr/bin/env bash
# What the libraries export and import. Shared: exactly the functions of dspark.h, not one more or
# less. Both: no import by which a library could print, exit, abort, read the environment or install a
# handler.
# usage: symbols.sh ROOT LIBDSPARK.so LIBDSPARK.a
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
root=$1
so=$2
archive=$3

declared=$(code_of "$root/include/dspark/dspark.h" | tr '\n' ' ' | grep -oE 'DSPARK_API [^;(]*\(' |
    grep -oE 'dspark_[a-z0-9_]+ *\($' | tr -d ' (' | sort -u)
exported=$(nm -D --defined-only "$so" | awk '{print $NF}' | sort -u)
[[ -n $declared && -n $exported ]] || fail 'nothing declared or nothing exported'
while IFS= read -r s; do fail "exported, not in dspark.h: $s"; done \
    < <(comm -13 <(printf '%s\n' "$declared") <(printf '%s\n' "$exported") | grep . || true)
while IFS= read -r s; do fail "in dspark.h, not exported: $s"; done \
    < <(comm -23 <(printf '%s\n' "$declared") <(printf '%s\n' "$exported") | grep . || true)
if grep -vE '^dspark_[a-z0-9]' <<< "$exported" | grep -q .; then
    fail "not a public name: $(grep -vE '^dspark_[a-z0-9]' <<< "$exported" | head -1)"
fi

banned='(__)?(v?f?printf|puts|putchar|fputs|fputc|putc|perror)(_chk)?|exit|_exit|abort|__assert_fail'
banned+='|(secure_)?getenv|setenv|putenv|signal|sigaction|raise|kill|system|fork|stdout|stderr|environ'
for lib in "$so" "$archive"; do
    dynamic=()
    [[ $lib != *.so* ]] || dynamic=(-D)
    hits=$(nm "${dynamic[@]}" -u "$lib" | awk '{print $NF}' | sed 's/@.*//' | grep -xE "$banned" | sort -u || true)
    [[ -z $hits ]] || fail "$lib imports: ${hits//$'\n'/ }"
done
# Internal names of the archive keep to the double underscore.
hits=$(nm -g --defined-only "$archive" | awk 'NF == 3 {print $3}' | grep -vE '^dspark_' | sort -u || true)
[[ -z $hits ]] || fail "global in the archive without our prefix: ${hits//$'\n'/ }"
finish "$(wc -l <<< "$exported") exported"
