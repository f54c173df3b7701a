#!/usr/bin/env python3
"""Markdown tables from the CSV that bench/run writes: the tables of docs/benchmarks.md.

    python3 bench/summary.py bench/results/2026-11-30/all.csv
"""
import csv
import sys


def number(row, key):
    return float(row[key]) if row.get(key) else 0.0


def seconds(value):
    if value <= 0:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.3f} ms" if value < 0.1 else f"{value * 1e3:.1f} ms"


def size(value):
    if value <= 0:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def table(head, lines):
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for line in lines:
        print("| " + " | ".join(line) + " |")
    print()


def unique(values):
    return list(dict.fromkeys(values))


def share(row):
    """A star where more than half of the repeats were disturbed."""
    star = "*" if number(row, "disturbed_left") else ""
    return f"{100 * number(row, 'share_of_roofline'):.0f}%{star}" if row["share_of_roofline"] else "-"


def numbers(row):
    """p50, p99, GB/s, GFLOP/s, share: what every table has."""
    return [seconds(number(row, "p50_s")), seconds(number(row, "p99_s")), f"{number(row, 'gb_per_s'):.3g}",
            f"{number(row, 'gflop_per_s'):.3g}", share(row)]


HEAD = ["p50", "p99", "GB/s", "GFLOP/s", "of the roofline"]


def key(row):
    """What is repeated: a block's stages share their repeats, contenders have their own."""
    names = ["over", "format", "threads", "isa", "tokens", "context", "sequences", "layers", "cache"]
    return tuple(row[k] for k in names) + ((row["stage"],) if row["what"] == "context" else ())


def note(rows):
    limits = [number(r, "limit_gb_per_s") for r in rows if r["limit_gb_per_s"]]
    compute = [number(r, "limit_gflop_per_s") for r in rows if r["limit_gflop_per_s"]]
    if limits:
        print(f"Limits: {min(limits):.3g} to {max(limits):.3g} GB/s between the repeats, "
              f"{min(compute):.3g} to {max(compute):.3g} GFLOP/s.", end=" ")
    once = {key(r): r for r in rows}.values()
    disturbed = sum(number(r, "disturbed") for r in once)
    if disturbed:
        tries = disturbed + sum(number(r, "repeats") - number(r, "disturbed_left") for r in once)
        print(f"{disturbed:.0f} of {tries:.0f} tries were disturbed.", end=" ")
    bad = [r for r in rows if r["reliable"] == "no"]
    print("NOT RELIABLE in part: see the reports.\n" if bad else "\n")


def context(rows, title):
    for threads in unique(r["threads"] for r in rows):
        mine = [r for r in rows if r["threads"] == threads]
        print(f"### {title}, {threads} thread{'' if threads == '1' else 's'}\n")
        note(mine)
        lines = []
        for n in unique(r["tokens"] for r in mine):
            by = {r["stage"]: r for r in mine if r["tokens"] == n}
            one = by["onepass"]
            line = [n] + numbers(one)
            for name in ("per-layer", "full"):
                line.append(f"{number(by[name], 'ratio'):.2f}x" if name in by else "-")
            for name in ("taps->states", "taps->cache onepass", "taps->cache full"):
                line.append(seconds(number(by[name], "p50_s")) if name in by else "-")
            lines.append(line)
        table(["positions"] + HEAD + ["per-layer / one pass", "full / one pass", "taps -> states", "taps -> cache",
                                      "the same, full"], lines)


def formats(rows):
    for threads in unique(r["threads"] for r in rows):
        mine = [r for r in rows if r["threads"] == threads]
        names = unique(r["format"] for r in mine)
        print(f"### Weight formats, {threads} thread{'' if threads == '1' else 's'}: times bf16's speed, share of its own "
              "roofline\n")
        note(mine)
        lines = []
        for n in unique(r["tokens"] for r in mine):
            by = {r["format"]: r for r in mine if r["tokens"] == n}
            lines.append([n] + [f"{number(by[f], 'ratio'):.2f}x, {share(by[f])}" if f != "bf16"
                                else f"{seconds(number(by[f], 'p50_s'))}, {share(by[f])}" for f in names])
        weights = {r["format"]: number(r, "weight_bytes") for r in mine}
        table(["positions"] + [f"{f} ({size(weights[f])})" for f in names], lines)


def stages(rows, title):
    keys = ("format", "threads", "context", "sequences", "cache")
    if title != "Drafted block":
        keys = ("format", "threads")
    for key in unique(tuple(r[k] for k in keys) for r in rows):
        mine = [r for r in rows if tuple(r[k] for k in keys) == key]
        text = ", ".join(f"{k} {v}" for k, v in zip(keys, key) if v)
        print(f"### {title}: {text}\n")
        note(mine)
        table(["stage", "n", "bytes"] + HEAD, [[r["stage"], r["tokens"] or "-", size(number(r, "bytes"))] + numbers(r)
                                            for r in mine])


def attention(rows):
    print("### Attention of one block\n")
    note(rows)
    table(["context", "cache", "threads", "bytes"] + HEAD,
          [[r["context"], r["cache"], r["threads"], size(number(r, "bytes"))] + numbers(r) for r in rows])


def load(rows):
    print("### From files to the first answer\n")
    note(rows)
    table(["stage", "threads", "bytes", "p50", "GB/s", "of the limit", "page faults", "peak resident"],
          [[r["stage"], r["threads"], size(number(r, "bytes")), seconds(number(r, "p50_s")), f"{number(r, 'gb_per_s'):.3g}",
            share(r), r["faults"] or "-", size(number(r, "peak_bytes"))] for r in rows])


def growth(rows):
    print("### Growth\n")
    note(rows)
    last = {"tokens": "onepass", "contexts": "attention", "layers": "the block", "sequences": "the block"}
    table(["over", "threads", "positions", "context", "sequences", "layers"] + HEAD,
          [[r["over"], r["threads"], r["tokens"], r["context"] or "-", r["sequences"] or "-", r["layers"]] + numbers(r)
           for r in rows if r["stage"] == last.get(r["over"])])


def peers(rows, section):
    print(f"### {section}\n")
    names = unique(r["stage"] for r in rows)
    lines = []
    for n in unique(r["tokens"] for r in rows):
        by = {r["stage"]: r for r in rows if r["tokens"] == n}
        lines.append([n] + [f"{seconds(number(by[s], 'p50_s'))} ({number(by[s], 'ratio'):.2f}x)" if s in by else "-"
                            for s in names])
    table(["n"] + names, lines)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with open(sys.argv[1], newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    for section in unique(r["section"] for r in rows):
        mine = [r for r in rows if r["section"] == section]
        if section.startswith("peer-"):
            peers(mine, section)
        elif section in ("context", "context-more", "avx2"):
            context(mine, {"context": "Context KV", "context-more": "Context KV, more sizes", "avx2": "AVX2"}[section])
        elif section == "formats":
            formats(mine)
        elif section == "draft":
            stages(mine, "Drafted block")
        elif section == "linear":
            stages(mine, "Linears")
        elif section == "attention":
            attention(mine)
        elif section == "load":
            load(mine)
        elif section == "growth":
            growth(mine)


if __name__ == "__main__":
    main()
