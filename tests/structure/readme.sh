#!/usr/bin/env bash
# The README is true: its C example is examples/minimal.c, every relative link leads to a file, and no
# path of somebody's machine is in the documentation.
# usage: readme.sh ROOT
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
cd "$1"

block=$(awk '/<!-- examples\/minimal.c -->/ {want = 1; next}
    want && /^```c$/ {inside = 1; next}
    inside && /^```$/ {exit}
    inside {print}' README.md)
[[ -n $block ]] || fail 'README.md: no C block after the examples/minimal.c marker'
if ! diff <(printf '%s\n' "$block") examples/minimal.c > /dev/null; then
    fail 'README.md and examples/minimal.c differ:'
    diff <(printf '%s\n' "$block") examples/minimal.c | head -10 || true
fi

n=0
for f in README.md CONTRIBUTING.md NEWS.md docs/*.md; do
    [[ -f $f ]] || { fail "$f is missing"; continue; }
    while IFS= read -r link; do
        n=$((n + 1))
        [[ -e $(dirname "$f")/${link%%#*} ]] || fail "$f: the link $link leads nowhere"
    done < <(links_of "$f")
    if grep -nE '(^|[^A-Za-z0-9_.])/(work|home|root)/' "$f"; then fail "$f: a path of one machine"; fi
done
# Every page of docs/ is linked from the README.
for f in docs/*.md; do
    grep -qF "($f" README.md || fail "README.md does not link $f"
done
finish "$n links"
