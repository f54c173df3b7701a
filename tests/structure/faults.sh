#!/usr/bin/env bash
# Every test that docs/faults.md names exists and is run by its program, and every row has a test, a
# public link and a number of its own.
# usage: faults.sh ROOT
# shellcheck disable=SC2016 # back quotes of Markdown
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
cd "$1"

[[ -f docs/faults.md ]] || fail 'docs/faults.md is missing'
n=0
while IFS=: read -r file test; do
    test=${test# }
    n=$((n + 1))
    if [[ ! -f tests/$file.c ]]; then
        fail "docs/faults.md: tests/$file.c does not exist"
    elif ! grep -qE "(cmocka_unit_test[a-z_]*|TEST)\\(${test}[,)]" <<< "$(code_of "tests/$file.c")"; then
        fail "docs/faults.md: tests/$file.c does not run $test"
    fi
done < <(grep -oE '`test_[a-z0-9_]+: [a-z0-9_]+`' docs/faults.md | tr -d '`')
((n > 0)) || fail 'docs/faults.md: no test is named'

rows=0
while IFS= read -r row; do
    rows=$((rows + 1))
    id=$(cut -d'|' -f2 <<< "$row" | tr -d ' ')
    [[ $row =~ \`test_[a-z0-9_]+:\ [a-z0-9_]+\` ]] || fail "docs/faults.md: $id has no test"
    [[ $row =~ \]\(https://github\.com/[A-Za-z0-9._-]+/[A-Za-z0-9._-]+/(pull|issues)/[0-9]+\) ]] ||
        fail "docs/faults.md: $id has no public link"
done < <(grep -E '^\| [A-Z][0-9]+ \|' docs/faults.md)
((rows > 0)) || fail 'docs/faults.md: no rows'
while IFS= read -r id; do
    fail "docs/faults.md: $id is used twice"
done < <(grep -oE '^\| [A-Z][0-9]+ \|' docs/faults.md | sort | uniq -d)

# The same numbers in comments of tests lead somewhere.
while IFS=: read -r file id; do
    grep -qE "^\| $id \|" docs/faults.md || fail "$file: no fault $id in docs/faults.md"
done < <(grep -oHE 'faults\.md [FRQPSMC][0-9]+' tests/test_*.c | sed -E 's/:faults\.md /:/')

finish "$n tests of $rows faults"
