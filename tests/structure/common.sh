# shellcheck shell=bash
# Sourced by the structural tests: a failure counter, comment stripping. Owns no check of its own.
export LC_ALL=C
failures=0

fail() {
    printf 'FAIL %s\n' "$*"
    failures=$((failures + 1))
}

finish() {
    if ((failures > 0)); then
        printf '%d failures\n' "$failures"
        exit 1
    fi
    printf 'ok: %s\n' "$*"
    exit 0
}

# The C text of a file with comments, string and character contents blanked; lines keep their number.
code_of() {
    awk '
    {
        out = ""; n = length($0); i = 1
        while (i <= n) {
            c = substr($0, i, 1); two = substr($0, i, 2)
            if (state == "comment") {
                if (two == "*/") { state = ""; i += 2 } else i++
            } else if (state != "") {
                if (c == "\\") i += 2
                else { if (c == state) { state = ""; out = out c } i++ }
            } else if (two == "/*") { state = "comment"; out = out " "; i += 2 }
            else if (two == "//") break
            else { if (c == "\"" || c == sq) state = c; out = out c; i++ }
        }
        if (state != "comment") state = ""
        print out
    }' sq="'" "$1"
}

# The relative links of a Markdown page, pictures included, one a line.
links_of() {
    grep -oE '\]\([^)#][^)]*\)|(src|href)="[^"#][^"]*"' "$1" |
        sed -E 's/^\]\(([^) ]*).*$/\1/; s/^(src|href)="(.*)"$/\2/' | grep -vE '^[a-z]+:' || true
}
