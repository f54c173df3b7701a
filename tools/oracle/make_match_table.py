#!/usr/bin/env python3
"""Writes python.tsv: patterns, names, and what Python says of them.

A line is: kind (re or glob), pattern, then for each name 1 or 0, a colon and the name, all
separated by tabs; a lone E instead of names: re.compile raises. Random patterns stay inside the
grammar that match.h serves, and a share of them is then damaged to reach the errors. Names are
short, so that Python's backtracking ends.

    python3 tools/oracle/make_match_table.py > tests/data/match/python.tsv
"""
import fnmatch
import random
import re
import sys
import warnings

SEED = 20260901
rng = random.Random(SEED)
warnings.simplefilter("ignore")

MODULES = [
    "layers.0.self_attn.kv_a_proj_with_mqa", "model.layers.3.self_attn.q_a_proj",
    "model.layers.13.mlp.gate_proj", "layers.4.mlp.down_proj", "context_proj", "lm_head",
    "model.embed_tokens", "markov_head.markov_w1", "confidence_head.proj",
    "model.layers.30.self_attn.kv_b_proj",
]
REAL_RE = [
    r"", r".*", r".*lm_head", r".*self_attn.*", r"layers\.\d+\.self_attn\..*", r"layers.3",
    r"model\.layers\.(0|1|3)\..*", r"model\.layers\.[0-9]+\.mlp\.(gate|up|down)_proj$",
    r".*kv_a_proj_with_mqa$", r"^model\.", r".*\.(q_a|kv_a)_proj(_with_mqa)?$", r"(?:model\.)?layers\.[0-4]\.",
    r".*layers\.(\d|1[0-3])\.", r".+_head$", r"\w+\.\w+\.\d{2}\.", r"\w+$", r"lm_hea", r"\bmlp\b",
    r".*\bmlp\b", r"[^.]+$", r"[a-z_]+\.[a-z_]+", r"model\.layers\.\d{1,}\.self", r".*proj\Z",
    r"\Amarkov_head\.markov_w[12]$", r"layers\.[^4]", r"(model\.|)layers", r"(a*)*b", r"(?:a|a)*$",
]
REAL_GLOB = [
    "*", "lm_head", "*self_attn*", "model.layers.3*", "model.layers.?.*", "*.mlp.*", "*kv_a*",
    "layers.*.self_attn.kv_[ab]_proj*", "*[!d]_proj", "model.layers.[0-3].*", "*proj", "**head",
    "layers", "*.30.*", "[lm]*", "m[!a-o]*", "*[", "*[]", "*[!]", "*[]_]*", "[z-a]*", "*[!z-a]*",
]
ALPHABET = "ab.1_-]"


def atom(depth):
    roll = rng.random()
    if roll < 0.40:
        return rng.choice(["a", "b", "1", "_", "-", r"\.", r"\-", r"\_", "]", "}", "{", r"\x61"])
    if roll < 0.55:
        return rng.choice([".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S"])
    if roll < 0.70:
        inside = "".join(rng.choice(["a", "b", "1", "_", ".", "a-b", "0-9", r"\d", r"\w", r"\]",
                                     r"\-", "^", "a-z", r"\W", r"\."])
                         for _ in range(rng.randint(1, 3)))
        if rng.random() < 0.1:
            inside = "]" + inside
        if rng.random() < 0.1:
            inside += "-"
        return "[" + ("^" if rng.random() < 0.3 else "") + inside + "]"
    if depth > 0:
        return rng.choice(["(", "(?:"]) + choices(depth - 1) + ")"
    return "a"


def repeat():
    return rng.choice(["*", "+", "?", "{2}", "{0}", "{,2}", "{1,}", "{1,3}", "{0,1}", "{,}", "{}",
                       "{a}", "*?", "+?", "??", "{1,2}?"])


def sequence(depth):
    out = []
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4])):
        if rng.random() < 0.08:
            out.append(rng.choice(["^", "$", r"\A", r"\Z", r"\b", r"\B"]))
            continue
        out.append(atom(depth) + (repeat() if rng.random() < 0.4 else ""))
    return "".join(out)


def choices(depth):
    return "|".join(sequence(depth) for _ in range(rng.choice([1, 1, 1, 2, 2, 3])))


def damage(pattern):
    at = rng.randrange(len(pattern) + 1)
    if rng.random() < 0.5:
        return pattern[:at] + rng.choice("()[]{}*+?|^$\\-,1a") + pattern[at:]
    return pattern[:at] + pattern[at + 1:]


def outside(pattern):
    """Valid in Python, refused here by name: not a matter of this table."""
    return re.search(r"\(\?(?!:)|\\[0-9uUNzGgkKpPXRQE]|\\x[89a-f]|[*+?}]\+|\\[^\x00-\x7f]", pattern)


def glob():
    return "".join(rng.choice(["a", "b", ".", "1", "-", "]", "*", "*", "?", "[ab]", "[!a]", "[a-b]",
                               "[!.]", "[", "[]a]", "[-a]", "[a-]", "[b-a]", "[!b-a1]", "\\", "^",
                               "[^a]", "[a-b-1]", "[--.]", "[!]]", "!"])
                   for _ in range(rng.randint(1, 6)))


def names():
    out = ["".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 9))) for _ in range(5)]
    return out + [rng.choice(["a", "ab", "aab", "1", "a.b", "bbb.a1", "a-"])]


def write(kind, pattern, candidates):
    fields = [kind, pattern]
    if kind == "re":
        try:
            compiled = re.compile(pattern)
        except re.error:
            print("\t".join(fields + ["E"]))
            return
        fields += ["%d:%s" % (compiled.match(n) is not None, n) for n in candidates]
    else:
        fields += ["%d:%s" % (fnmatch.fnmatchcase(n, pattern), n) for n in candidates]
    print("\t".join(fields))


def main():
    for pattern in REAL_RE:
        write("re", pattern, MODULES)
    for pattern in REAL_GLOB:
        write("glob", pattern, MODULES)
    for i in range(1500):
        pattern = choices(2)
        if i % 4 == 3:
            pattern = damage(pattern)
        if not outside(pattern):
            write("re", pattern, names())
    for _ in range(500):
        write("glob", glob(), names())


if __name__ == "__main__":
    sys.exit(main())
