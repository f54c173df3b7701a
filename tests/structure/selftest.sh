#!/usr/bin/env bash
# The structural tests themselves: a small good tree passes, and each kind of breach is caught.
# usage: selftest.sh STRUCTURE_DIR
# shellcheck disable=SC2016 # back quotes of Markdown
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "$0")/common.sh"
here=$(cd "$1" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

good_tree() {
    rm -rf "$tmp/t"
    mkdir -p "$tmp/t"/{include/dspark,src/{base,ckpt,quant,kern/avx2,model},cli,examples,tests,bench,docs}
    cd "$tmp/t"
    printf '/* header */\nDSPARK_API const char *dspark_version(void);\n' > include/dspark/dspark.h
    printf '/* api */\n#include "dspark/dspark.h"\nconst char *dspark_version(void)\n{\n    return "exit(";\n}\n' > src/api.c
    printf '/* base */\n#include "dspark/dspark.h"\n/* abort() and printf() in words are fine */\n' > src/base/a.h
    printf '/* ckpt */\n#include "base/a.h"\n' > src/ckpt/b.h
    printf '/* quant */\n#include "ckpt/b.h"\n#include "kern/kern.h"\n' > src/quant/c.h
    printf '/* kern */\n#include "base/a.h"\n' > src/kern/kern.h
    printf '/* avx2 */\n#include "kern/kern.h"\n#include "own.h"\n' > src/kern/avx2/k.c
    printf '/* own */\n' > src/kern/avx2/own.h
    printf '/* model */\n#include "kern/kern.h"\n#include "quant/c.h"\n' > src/model/d.c
    printf '/* cli */\n#include <stdio.h>\n#include "dspark/dspark.h"\n#include "cli.h"\n' > cli/main.c
    printf '/* cli */\n' > cli/cli.h
    printf '/* example */\n#include <dspark/dspark.h>\n' > examples/minimal.c
    printf '/* test */\n/* see faults.md F1 */\nint t = cmocka_unit_test(test_here);\n' > tests/test_x.c
    printf '| F1 | [a](https://github.com/a/b/pull/1) | c | d | `test_x: test_here` |\n' > docs/faults.md
}

expect() { # pass|fail SCRIPT WHAT
    local want=$1 script=$2 what=$3 got=pass
    bash "$here/$script" "$tmp/t" > "$tmp/out" 2>&1 || got=fail
    [[ $got == "$want" ]] || fail "$script, $what: want $want, got $got: $(head -3 "$tmp/out")"
}

breach() { # SCRIPT WHAT FILE TEXT...
    local script=$1 what=$2 file=$3
    shift 3
    good_tree
    # shellcheck disable=SC2059
    printf "$@" >> "$tmp/t/$file"
    expect fail "$script" "$what"
}

good_tree
expect pass sources.sh 'a good tree'
expect pass arrows.sh 'a good tree'
expect pass faults.sh 'a good tree'

breach sources.sh 'a call of printf' src/base/a.h 'static void f(void) { printf("x"); }\n'
breach sources.sh 'stderr' src/base/a.h 'static void *f(void) { return stderr; }\n'
breach sources.sh 'exit' src/model/d.c 'static void f(void) { exit (1); }\n'
breach sources.sh 'abort after a comment' src/model/d.c '/* a */ static void f(void) { abort(); }\n'
breach sources.sh 'assert' src/model/d.c 'static void f(int a) { assert(a); }\n'
breach sources.sh 'getenv' src/kern/avx2/k.c 'static char *f(void) { return getenv("A"); }\n'
breach sources.sh 'signal' src/ckpt/b.h 'static void f(void) { signal(1, 0); }\n'
breach sources.sh 'not ASCII' cli/main.c '/* \xc3\xa9 */\n'
breach sources.sh 'a tab' cli/main.c '\tint a;\n'
breach sources.sh 'trailing blanks' cli/main.c 'int a; \n'
breach sources.sh 'no final newline' cli/main.c 'int a;'
breach sources.sh 'too long' cli/main.c '%s\n' "$(yes 'int a;' | head -800)"
breach sources.sh 'no opening comment' tests/test_a.c 'int a;\n'
breach sources.sh 'an undefined export' include/dspark/dspark.h 'DSPARK_API int dspark_foo(int a);\n'
breach sources.sh 'a public name outside api.c' src/model/d.c 'int dspark_foo(int a)\n{\n    return a;\n}\n'
breach arrows.sh 'base to ckpt' src/base/a.h '#include "ckpt/b.h"\n'
breach arrows.sh 'ckpt to quant' src/ckpt/b.h '#include "quant/c.h"\n'
breach arrows.sh 'kern to ckpt' src/kern/kern.h '  #  include "ckpt/b.h"\n'
breach arrows.sh 'quant into kern' src/quant/c.h '#include "kern/avx2/own.h"\n'
breach arrows.sh 'quant to model' src/quant/c.h '#include "model/d.h"\n'
breach arrows.sh 'climbing' src/model/d.c '#include "../base/a.h"\n'
breach arrows.sh 'a file that is not there' src/model/d.c '#include "nowhere.h"\n'
breach arrows.sh 'cli into src' cli/main.c '#include "base/a.h"\n'
breach arrows.sh 'cli uses an internal name' cli/main.c 'int dspark__foo(void);\n'
breach arrows.sh 'examples into src' examples/minimal.c '#include "model/d.h"\n'

fault='| %s | [a](https://github.com/a/b/issues/2) | c | d | `%s` |\n'
breach faults.sh 'a test that is not run' docs/faults.md "$fault" F2 'test_x: test_gone'
breach faults.sh 'a file that is not there' docs/faults.md "$fault" F2 'test_z: test_here'
breach faults.sh 'a row without a test' docs/faults.md "$fault" F2 'none'
breach faults.sh 'a number used twice' docs/faults.md "$fault" F1 'test_x: test_here'
breach faults.sh 'a row without a link' docs/faults.md '| F2 | a | c | d | `test_x: test_here` |\n'
breach faults.sh 'a comment that leads nowhere' tests/test_x.c '/* faults.md F9 */\n'

cd /
finish 'structural tests catch every kind of breach'
