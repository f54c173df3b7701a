#!/usr/bin/env python3
"""Compare what `dspark context` wrote with what twin.py wrote.

    dspark context CKPT --taps DUMP --out CACHE.safetensors
    python3 tools/oracle/twin.py CKPT DUMP TWIN.safetensors
    python3 tools/oracle/check.py CACHE.safetensors TWIN.safetensors [--latent W]

CACHE holds layers.{l}.kv_cache [blocks, block_size, entry] (bf16), slot_mapping and positions.
Prints a line per layer and part; ends with 1 when an element is more than 2 bf16 steps away (and
that is not just a sum that cancelled), or when more than 10 % differ at all.
"""
import argparse
import sys

import torch
from safetensors.torch import load_file

STEPS = 2.0
SMALL = 2.0**-11  # of the row's rms: the error of an fp32 sum, where the sum itself is near zero
SHARE = 0.10


def steps_apart(a, b):
    """Distance in bf16 steps of the smaller of the two."""
    least = torch.minimum(a.abs(), b.abs())
    exponent = torch.frexp(least)[1].clamp(min=-125)
    step = torch.ldexp(torch.ones_like(least), exponent - 8)
    return (a - b).abs() / step


def compare(label, got, want):
    got, want = got.double(), want.double()
    rms = want.pow(2).mean(-1, keepdim=True).sqrt()
    off = (got - want).abs()
    steps = steps_apart(got, want)
    large = off > SMALL * rms
    differ = (got != want).sum().item()
    over = (large & ~(steps <= STEPS)).sum().item()
    worst = steps[large].max().item() if large.any() else 0.0
    good = over == 0 and differ <= SHARE * got.numel() + 1 and bool(torch.isfinite(got).all())
    print("%-18s %9d values %8d differ (%.3f %%) worst %.1f steps, %d over  %s"
          % (label, got.numel(), differ, 100.0 * differ / max(got.numel(), 1), worst, over,
             "ok" if good else "NO"))
    return good


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("cache")
    p.add_argument("twin")
    p.add_argument("--latent", type=int, default=512, help="width of the latent (kv_lora_rank)")
    a = p.parse_args()
    cache, twin = load_file(a.cache), load_file(a.twin)
    slots, positions = cache["slot_mapping"], cache["positions"]
    n = twin["positions"].shape[0]
    if not torch.equal(positions[:n], twin["positions"]):
        sys.exit("the positions differ: twin.py --start must be context's --start-position")
    good = True
    for layer, want in enumerate(twin["entries"]):
        kv = cache["layers.%d.kv_cache" % layer]
        if kv.dtype != torch.bfloat16:
            sys.exit("a bf16 cache is needed, found %s" % kv.dtype)
        got = kv.reshape(-1, kv.shape[-1])[slots[:n]]
        for part, at in (("latent", slice(0, a.latent)), ("rope key", slice(a.latent, None))):
            good &= compare("layer %d %s" % (layer, part), got[:, at], want[:, at])
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
