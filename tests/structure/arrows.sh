#!/usr/bin/env bash
# Include arrows go one way: base <- ckpt <- quant; kern and spec use base only; model uses all of them;
# api*.c stand on top; cli/ and examples/ see nothing of ours but dspark/dspark.h.
# usage: arrows.sh ROOT
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
cd "$1"

declare -A allowed=(
    [base]='base dspark'
    [ckpt]='base ckpt dspark'
    [quant]='base ckpt quant kern dspark'
    [kern]='base kern dspark'
    [spec]='base spec dspark'
    [model]='base ckpt quant kern spec model dspark'
    [api.c]='api.h base ckpt quant kern model dspark'
    [api.h]='base dspark'
    [api_draft.c]='api.h base ckpt quant kern spec model dspark'
)
n=0
# The one way out of the column: packing is plain data movement that schemes hand to the kernels' own
# layout, so quant may name kern/kern.h and nothing else of kern.
while IFS=: read -r file text; do
    inc=${text#*\"}
    inc=${inc%%\"*}
    layer=${file#src/}
    layer=${layer%%/*}
    n=$((n + 1))
    if [[ -z ${allowed[$layer]-} ]]; then
        fail "$file: the layer '$layer' is not in the list of arrows"
        continue
    fi
    case $inc in
        */*) to=${inc%%/*} ;;
        api.h) to=api.h ;;
        *) to=$layer # a file beside it
            [[ -f $(dirname "$file")/$inc ]] || fail "$file: \"$inc\" is neither a layer's nor beside it"
            ;;
    esac
    [[ " ${allowed[$layer]} " == *" $to "* ]] || fail "$file: $layer must not include \"$inc\""
    if [[ $layer == quant && $to == kern && $inc != kern/kern.h ]]; then
        fail "$file: quant may see kern/kern.h only, not \"$inc\""
    fi
    [[ $inc != *..* ]] || fail "$file: \"$inc\" climbs out of its folder"
done < <(grep -rHE '^[ ]*#[ ]*include[ ]*"' src --include='*.[ch]')
((n > 0)) || fail 'no include found under src'

for dir in cli examples; do
    [[ -d $dir ]] || continue
    while IFS=: read -r file text; do
        inc=${text#*[<\"]}
        inc=${inc%%[>\"]*}
        n=$((n + 1))
        case $inc in
            dspark/dspark.h) ;;
            base/* | ckpt/* | quant/* | kern/* | spec/* | model/* | src/* | *..*)
                fail "$file: sees the inside of the library: $inc" ;;
            *) if [[ $text == *'"'* ]]; then
                [[ -f $dir/$inc ]] || fail "$file: \"$inc\" is not beside it"
            fi ;;
        esac
    done < <(grep -rHE '^[ ]*#[ ]*include' "$dir" --include='*.[ch]')
    if grep -rnE '(^|[^A-Za-z0-9_])dspark__[a-z]' "$dir" --include='*.[ch]' | grep -q .; then
        fail "$dir: uses an internal name: $(grep -rnE 'dspark__[a-z]' "$dir" --include='*.[ch]' | head -1)"
    fi
done

finish "$n includes"
