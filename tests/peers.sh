#!/usr/bin/env bash
# The libraries that other people quantise with, run against ours in both directions: what `quantize`
# writes is read by compressed-tensors and ModelOpt, what ModelOpt writes is read here, and every value
# is compared. Opt-in: DSPARK_ORACLE_PYTHON names a Python that has them (tools/oracle/README.md); without
# it, or without compressed-tensors, the test is skipped; without nvidia-modelopt its half is.
#
#     peers.sh SOURCE_DIR DSPARK
set -eu
source=$1
dspark=$2
python=${DSPARK_ORACLE_PYTHON:-}
oracle=$source/tools/oracle
export PYTHONDONTWRITEBYTECODE=1
if [ -z "$python" ] || ! "$python" -c 'import compressed_tensors, safetensors, torch' 2>/dev/null; then
    echo "skipped: DSPARK_ORACLE_PYTHON is no Python with torch, safetensors and compressed-tensors"
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

"$dspark" synth one --preset tiny >synth.out
"$dspark" synth many --preset tiny --shard-size 60000 >synth.out

# written here, read there
both() {
    "$dspark" quantize "$1" q --format "$2" "${@:3}" >quantize.out
    "$dspark" quantize q b --format bf16 >quantize.out
    "$python" "$oracle/check_quant.py" q b 2>python.err || {
        cat python.err
        exit 1
    }
    rm -r q b
}
for scales in absmax mse; do
    for format in fp8-tensor fp8-channel fp8-block nvfp4 mxfp4 mxfp8 int8; do
        both one $format --scales $scales
    done
    both one int4 --group-size 32 --scales $scales
    both one nvfp4 --layout modelopt --scales $scales
    both one fp8-tensor --layout modelopt --scales $scales
done
both many nvfp4
both many nvfp4 --layout modelopt
both many fp8 --ignore 're:.*kv_a_proj_with_mqa' --ignore 'layers.3.*'
both many mxfp8 --targets '*.mlp.*'

# written there, read here
if ! "$python" -c 'import sys; sys.path.insert(0, sys.argv[1]); import modelopt_export' "$oracle" \
        2>/dev/null; then
    echo "nvidia-modelopt is not there: its half is skipped"
    exit 0
fi
for algorithm in nvfp4 nvfp4-a16 fp8 fp8-channel mxfp8 mxfp4-fp8 int8 fp8-block; do
    "$python" "$oracle/modelopt_checkpoint.py" write one m $algorithm >python.err 2>&1 || {
        cat python.err
        exit 1
    }
    "$dspark" inspect m >inspect.out
    "$dspark" quantize m b --format bf16 >quantize.out
    "$python" "$oracle/modelopt_checkpoint.py" check m b
    rm -r m m.back.safetensors b
done
