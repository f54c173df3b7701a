#!/usr/bin/env bash
# examples/generate: where its dump must not or cannot be is told before any text is made, files of the
# models stay as they are, and unknown words are refused.
#
#     generate_outputs.sh GENERATE MODELS
set -eu
generate=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$2" "$work/models"
cd "$work"
before=$(cat models/*/* | cksum)

# expect CODE ARGUMENTS...: that exit code, and not a byte of text unless it is 0
expect() {
    local code=0
    "$generate" --target models/target --draft models/drafter --bytes 16 "${@:2}" >out 2>err || code=$?
    if [ $code -ne "$1" ] || { [ $code -ne 0 ] && [ -s out ]; } || { [ $code -ne 0 ] && [ ! -s err ]; }; then
        echo "generate ${*:2}: exit code $code, expected $1"
        cat out err
        exit 1
    fi
}

expect 1 --dump models/target/model.safetensors
expect 1 --dump models/drafter/new.safetensors
ln -s models/drafter link
expect 1 --dump link/config.json
expect 1 --dump nowhere/dump.safetensors
expect 1 --dump models
expect 2 --colour sometimes
expect 2 --colour
expect 0 --colour never --dump dump.safetensors
[ -s dump.safetensors ]
[ "$(cat models/*/* | cksum)" = "$before" ]
