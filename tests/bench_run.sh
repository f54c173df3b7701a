#!/usr/bin/env bash
# bench/run: of a folder that it is told to write to it removes what it wrote there before and nothing else, and
# a section that does not exist is refused. The command that would measure is a stand-in.
#
#     bench_run.sh BENCH_RUN
set -eu
run=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir build out full
cat > build/dspark << 'TEXT'
#!/usr/bin/env bash
while (($#)); do
    [[ $1 != --csv ]] || printf 'what,stage\nlinear,one\n' > "$2"
    shift
done
TEXT
chmod +x build/dspark
echo mine | tee out/mine.csv out/mine.svg out/CMakeLists.txt out/peer-mine.csv > /dev/null
echo old | tee out/draft.csv out/draft.txt out/all.csv > /dev/null

"$run" --build build --out out --full full --only linear --python true > /dev/null
for f in mine.csv mine.svg CMakeLists.txt peer-mine.csv; do
    [ "$(cat out/$f 2>&1)" = mine ] || { echo "$f is gone"; exit 1; }
done
[ ! -e out/draft.csv ] && [ ! -e out/draft.txt ] || { echo "an earlier run's files stayed"; exit 1; }
[ "$(cat out/all.csv)" = "$(printf 'section,what,stage\nlinear,linear,one')" ] || { cat out/all.csv; exit 1; }

code=0
"$run" --build build --out new --full full --only linear,nope --python true > said 2>&1 || code=$?
[ $code -eq 2 ] && grep -q "no section 'nope'" said && [ ! -e new ] || { cat said; exit 1; }
