#!/usr/bin/env bash
# What holds for every source file: length, ASCII, line endings, an opening comment; and what the
# library may never call: it does not print, exit, abort, read the environment or touch signals.
# usage: sources.sh ROOT
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
root=$1
cd "$root"

mapfile -t files < <(find include src cli examples tests bench -name '*.[ch]' | sort)
((${#files[@]} > 0)) || fail "no sources under $root"
for f in "${files[@]}"; do
    n=$(wc -l < "$f")
    most=800
    [[ $f == include/dspark/dspark.h ]] && most=1200 # the manual is one text
    ((n < most)) || fail "$f: $n lines, the limit is $most"
    if grep -nP '[^\x00-\x7f]' "$f" > /dev/null; then
        fail "$f: not ASCII: $(grep -nP '[^\x00-\x7f]' "$f" | head -1)"
    fi
    if grep -q $'[\t\r]' "$f"; then fail "$f: a tab or a carriage return"; fi
    if grep -nE ' +$' "$f" > /dev/null; then
        fail "$f: white space ends line $(grep -nE ' +$' "$f" | head -1 | cut -d: -f1)"
    fi
    [[ $(tail -c 1 "$f" | od -An -c) == *'\n'* ]] || fail "$f: no newline at the end"
    [[ $(head -c 2 "$f") == '/*' ]] || fail "$f: does not open with what it owns"
done

banned='printf|vprintf|puts|putchar|fprintf|vfprintf|fputs|fputc|putc|perror|psignal|exit|_exit|_Exit'
banned+='|quick_exit|abort|assert|atexit|getenv|secure_getenv|setenv|putenv|signal|sigaction|raise'
banned+='|kill|system|popen|fork|strtok|gets|sprintf|vsprintf|alloca|setlocale'
while IFS= read -r f; do
    hits=$(code_of "$f" | grep -nE "(^|[^A-Za-z0-9_.>])($banned) *\(" || true)
    [[ -z $hits ]] || fail "$f: forbidden call: $(head -1 <<< "$hits")"
    hits=$(code_of "$f" | grep -nE '(^|[^A-Za-z0-9_])(stdout|stderr|environ)([^A-Za-z0-9_]|$)' || true)
    [[ -z $hits ]] || fail "$f: forbidden object: $(head -1 <<< "$hits")"
done < <(find src -name '*.[ch]' | sort)

# Every exported function is defined in src/api*.c, and nowhere else is a public name defined.
mapfile -t exported < <(code_of include/dspark/dspark.h | tr '\n' ' ' | grep -oE 'DSPARK_API [^;(]*\(' |
    grep -oE 'dspark_[a-z0-9_]+ *\($' | tr -d ' (' | sort)
((${#exported[@]} > 0)) || fail 'dspark.h: no exported function found'
if [[ -f src/api.c ]]; then
    defined=$(for f in src/api*.c; do code_of "$f"; done | grep -E '^[a-z].*[( *]dspark_[a-z0-9_]+\(' |
        grep -oE 'dspark_[a-z0-9_]+\(' | tr -d '(' | sort -u)
    for f in "${exported[@]}"; do
        grep -qx "$f" <<< "$defined" || fail "src/api*.c: $f of dspark.h is not defined"
    done
    while IFS= read -r f; do
        hits=$(code_of "$f" | grep -nE '^[a-z][A-Za-z0-9_ *]*[ *]dspark_[a-z0-9][a-z0-9_]*\(' | grep -v ';$' || true)
        [[ -z $hits ]] || fail "$f: defines a public name: $(head -1 <<< "$hits")"
    done < <(find src -name '*.c' ! -path 'src/api*.c' | sort)
else
    fail 'src/api.c is missing'
fi

finish "${#files[@]} files, ${#exported[@]} exported functions"
