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

# The summary counts disturbed tries (a block's stages share theirs) and marks rows that kept them.
command -v python3 > /dev/null || exit 0
{
    printf '%s,' section what over stage format cache isa threads tokens context sequences layers weights repeats \
        outliers disturbed disturbed_left best_s p50_s p99_s bytes weight_bytes flops gb_per_s gflop_per_s \
        limit_gb_per_s limit_gflop_per_s compute_probe_gflop_per_s roofline_s share_of_roofline ratio ratio_is \
        of_byte_ratio faults peak_bytes
    echo reliable
    for stage in o down 'the block'; do
        echo "draft,draft,,$stage,bf16,bf16,ref,2,7,64,1,5,cold,6,0,3,0,1,1,1,9,9,9,9,9,10,20,,1,0.9,,,,,,yes"
    done
    echo "draft,draft,,o,bf16,bf16,ref,2,7,99,1,5,cold,5,0,8,5,1,1,1,9,9,9,9,9,10,20,,1,0.8,,,,,,no"
} > disturbed.csv
python3 "$(dirname "$run")/summary.py" disturbed.csv > said
grep -q '^Limits: 10 to 10 GB/s .* 20 to 20 GFLOP/s\. 3 of 9 tries were disturbed\. ' said || { cat said; exit 1; }
grep -q '8 of 8 tries were disturbed\. NOT RELIABLE' said && grep -q '| 80%\* |' said && grep -q '| 90% |' said ||
    { cat said; exit 1; }
