#!/usr/bin/env python3
"""Write the golden files of tests/data/golden-draft: what the whole draft step must give.

    python3 tools/oracle/draft_golden.py OUT_DIR [NAME ...]   # all: two minutes on one core, 3 GB
    python3 tools/oracle/draft_golden.py --noise [NAME ...]   # what the advice below is drawn from

Needs torch, numpy and safetensors. Nothing here reads what the C library wrote: weights and dumps
come from generator.py, results from draft.py (Sums: torch's fp32 products, one rounding each).

Files: `NAME.safetensors` a case, `target-HxV/` a target directory (config.json, model.safetensors
with embed_tokens.weight and lm_head.weight [V, H], generated values of the seed in its metadata).
All drafters but `pro` have an embed_tokens of their own, with other values: theirs must win.

Metadata of a case (strings):

    preset, settings   of the checkpoint: `dspark synth --preset P --set LINE ...`, one setting a
                       line (16 at most)
    seed               of the checkpoint
    first_position     position of the dump's row 0. It is 0 but in `far` (sessions start at 0: that
                       one needs dspark_context_run with positions, and dspark_draft)
    target             name of the target directory; empty in `k3-layer`, whose lm_head is to be
                       made by the generator:
    target_seed        lm_head.weight [vocab, h] of this seed, as in every target
    cache_dtype        bf16, fp8_e4m3, fp8_e5m2, fp8_ds_mla
    scales             of the cache, one number a layer and line, to be read as fp32; empty: all 1
    tile_scale         pow2 or exact (fp8_ds_mla)
    columns            c: hidden, hidden_normalised, layer_0, heads_0, attention_0 hold columns
                       0, c, 2c ..
    greedy_margin      least top2_gap of the file in units of the row's rms of logits

Tensors; A drafts, N rows of a block, h' = ceil(h / columns). Each draft stands alone:

    anchor_positions   [A] I64            S: the context is rows 0 .. S-1 of a dump, positions
                                          first_position + 0 .. S-1; the block starts at
                                          first_position + S
    dump_seeds         [A] I64            of that dump: `dspark synth --dump FILE --for CKPT
                                          --seed D --tokens S+1`. Values of a row do not depend on
                                          the number of rows: drafts of one seed can share the
                                          longest dump (all of `one-dump` do)
    anchor_tokens      [A] I64            token id S of the dump
    tokens             [A, N] I64         greedy
    hidden             [A, N, h'] BF16    after final_norm
    base_logits        [A, N, vocab] BF16 times logit_scale, before the Markov bias
    logits             [A, N, vocab] BF16 with it
    top2_gap           [A, N] F32         between the two largest logits of a row
    confidence_logits  [A, N] F32         absent in `no-confidence`
    confidence         [A, N] F32         likewise; the sigmoid
    hidden_normalised  [A, N, h'] BF16    hidden when softmax terms are divided, then rounded
    layer_0            [A, N, h'] BF16    residual stream after layer 0 (to find a fault)
    heads_0            [A, N, c'] BF16    layer 0, heads side by side before o_proj (likewise)
    attention_0        [A, N, h'] BF16    layer 0, after o_proj (likewise)

Dumps were chosen (find_dump) so that neither the order of a sum nor the place where the softmax is
rounded changes a token, and, but in `k3-layer`, so that other orders of sums (fp64; strips of 32
from the end; strips of 2 from the start) give the same bits in every layer.

How far an implementation with the same rounding points may be off. rms and max are of one row's
difference, in units of that row's rms. A draft is short when S + N <= 240, else long: an
implementation that takes the context in pieces with the maximum so far rounds other softmax terms
there. Measured by --noise over dumps that were not chosen, in brackets (short / long):

    tokens             ==                 in every file, k3-layer included
    hidden, base_logits, logits, layer_0  of every row: rms <= 0.03, max <= 0.12
                                          [orders of sums 0.024, 0.073 / 0.017, 0.056; pieces of 240
                                          0, 0 / 0.020, 0.062]; k3-layer rms <= 0.012, max <= 0.10
                                          [0.005, 0.031 / 0.005, 0.047]
    share of hidden elements that differ at all, over all drafts of all files but k3-layer:
                                          short <= 20 % [dumps not chosen 3 to 7 %, chosen 0]
                                          long  <= 85 % [orders of sums 14 to 24 %, pieces 67 %]
                                          k3-layer short <= 65 % [43 %], long <= 75 % [55 %]
    confidence_logits  |difference| <= 0.06 [0.026 / 0.031]; confidence follows: <= 0.015
    hidden_normalised  against an implementation that rounds before it divides: rms <= 0.07 [0.056]

One step of bf16 anywhere reaches every later value, so elements that differ come in whole rows. A
rounding point that is missing gives rms 0.02 to 0.06, which only the share for short drafts catches
(80 % instead of a few). Any other fault gives more than the rms (draft_check.py faults: the
smallest are entries of the block that miss an fp8 cache, 0.076, and an rnn state that is forgotten,
0.147 in the logits), or moves confidences (without the bias: all of them). Only the shares are sums
over many drafts; the rest holds for each row.
"""
import json
import os
import sys

import torch
from safetensors.torch import save_file

import generator
from draft import (Cache, DraftTwin, Sums, SumsF64, SumsInPieces, SumsInStrips, SumsNormalised)
from make_golden import K3, apply
from twin import SyntheticWeights, bf16_from_bits

BASE = dict(K3, intermediate_size=14336, num_attention_heads=64, q_lora_rank=1536,
            qk_nope_head_dim=128, v_head_dim=128, target_num_hidden_layers=93,
            mask_token_id=163837, markov_rank=256, markov_head_type="vanilla",
            enable_confidence_head=True, confidence_head_with_markov=True)
TINY = ["hidden_size=64", "intermediate_size=128", "num_attention_heads=4", "q_lora_rank=32",
        "kv_lora_rank=16", "qk_nope_head_dim=8", "qk_rope_head_dim=8", "v_head_dim=8",
        "vocab_size=97", "target_num_hidden_layers=8", "target_layer_ids=[1, 2, 4, 5, 7]",
        "mask_token_id=96", "markov_rank=8", "block_size=7"]
# preset: has it an embedding of its own; its settings over K3's
PRESETS = {
    "tiny": (True, TINY),
    "kimi-k3": (True, []),
    "kimi-k3.1-pro": (False, ["num_attention_heads=96", "markov_rank=512", "is_causal=true"]),
}
TARGET_SEED = 4001
SAMPLES = 4      # dumps an anchor position, when noise is measured

ODD = ["hidden_size=50", "intermediate_size=70", "num_attention_heads=3", "q_lora_rank=33",
       "kv_lora_rank=19", "qk_nope_head_dim=9", "qk_rope_head_dim=6", "v_head_dim=7",
       "num_hidden_layers=3", "markov_rank=5", "block_size=5"]
WIDE = ["num_hidden_layers=2", "num_attention_heads=2", "kv_lora_rank=512", "qk_rope_head_dim=64",
        "qk_nope_head_dim=16", "v_head_dim=16"]
K3_LAYER = ["num_hidden_layers=1", "vocab_size=512", "mask_token_id=511", "target_layer_ids=[89]"]
E4M3_SCALES = [0.0113, 0.01, 0.0171, 0.0125, 0.0093]
E5M2_SCALES = [1.0, 0.3, 2.0, 0.77, 1.25]


class Weights(SyntheticWeights):
    """A generated file, kept once made."""

    def __init__(self, seed, own_embedding):
        super().__init__(seed)
        self.kept = {}
        self.where = {"confidence_head.proj.bias"} | ({"embed_tokens.weight"} if own_embedding
                                                      else set())

    def keep(self, name, make):
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def rows(self, name, shape, first, n):
        assert first == 0 and n == shape[0]
        return self.keep(name, lambda: super(Weights, self).rows(name, shape, first, n))

    def vector(self, name, n):
        return self.keep(name, lambda: super(Weights, self).vector(name, n))


class Case:
    def __init__(self, seed, anchors, settings=(), preset="tiny", first_position=0,
                 cache_dtype="bf16", scales=None, tile_scale="pow2", columns=1, together=False):
        self.seed, self.anchors, self.settings, self.preset = seed, anchors, list(settings), preset
        self.first_position, self.columns, self.together = first_position, columns, together
        self.cache_dtype, self.scales, self.tile_scale = cache_dtype, scales, tile_scale
        self.own_embedding, base = PRESETS[preset]
        self.config = apply(apply(BASE, base), self.settings)
        self.weights = Weights(seed, self.own_embedding)

    def target(self):
        return "target-%dx%d" % (self.config["hidden_size"], self.config["vocab_size"])

    def twin(self, sums=None, kind=DraftTwin):
        cache = Cache(self.cache_dtype, self.scales, self.tile_scale)
        return kind(self.config, self.weights, Weights(TARGET_SEED, True), sums, cache)

    def is_large(self):
        return self.columns > 1

    def variants(self):
        return {k: v for k, v in VARIANTS.items() if not (self.is_large() and k == "in order")}

    def n(self):
        return self.config.get("block_size", 7)

    def dump(self, seed, n):
        n_taps, width = len(self.config["target_layer_ids"]), self.config["target_hidden_size"]
        bits = generator.tensor("hidden_states", [n, n_taps + 1, width], seed)
        taps = bf16_from_bits(bits)[:, :n_taps].reshape(n, n_taps * width)
        return taps, generator.token_ids(seed, n, self.config["vocab_size"])

    def run(self, dump_seed, anchors, sums=None, kind=DraftTwin):
        taps, ids = self.dump(dump_seed, max(anchors) + 1)
        return self.twin(sums, kind).run(taps, ids, anchors, self.first_position)


# Anchors: no context, one entry, a few, more than one piece of 240 (236 + 7 rows lie across its
# end, 233 + 7 end with it).
CASES = {
    "vanilla": Case(11, [0, 1, 17, 233, 236, 300]),
    "causal": Case(12, [0, 1, 17, 236, 300], ["is_causal=true"]),
    "rope-default": Case(13, [0, 17, 300], ["rope_parameters=null"]),
    "mscale": Case(14, [0, 17, 300], [
        "rope_parameters.mscale=0.7", "rope_parameters.mscale_all_dim=1.3",
        "rope_parameters.factor=4.0", "rope_parameters.beta_fast=16",
        "rope_parameters.original_max_position_embeddings=1000", "qk_rope_head_dim=16",
        "rms_norm_eps=1e-3"]),
    "far": Case(15, [17, 300], first_position=1000000),
    "gated": Case(16, [1, 17, 300], ["markov_head_type=gated"]),
    "rnn": Case(17, [1, 17, 300], ["markov_head_type=rnn"]),
    "rnn-scaled": Case(18, [17, 300], ["markov_head_type=rnn", "logit_scale=0.5",
                                       "confidence_head_with_markov=false"]),
    "confidence-hidden": Case(19, [17], ["confidence_head_with_markov=false"]),
    "no-confidence": Case(20, [17], ["enable_confidence_head=false"]),
    "logit-scale": Case(21, [17, 300], ["logit_scale=0.5"]),
    "logit-scale-odd": Case(22, [17, 300], ["logit_scale=1.3"]),
    "fc-norm": Case(23, [0, 17, 300], ["fc_norm=true"]),
    "odd": Case(24, [0, 17, 236, 300], ODD),
    "odd-causal-gated": Case(25, [0, 17, 300], ODD + ["is_causal=true", "fc_norm=true",
                                                      "markov_head_type=gated",
                                                      "rope_parameters=null"]),
    "pro": Case(26, [0, 17, 300], [
        "hidden_size=64", "intermediate_size=128", "num_attention_heads=6", "q_lora_rank=32",
        "kv_lora_rank=16", "qk_nope_head_dim=8", "qk_rope_head_dim=8", "v_head_dim=8",
        "vocab_size=97", "target_num_hidden_layers=8", "target_layer_ids=[1, 2, 4, 5, 7]",
        "mask_token_id=96", "markov_rank=16", "block_size=7"], "kimi-k3.1-pro"),
    "fp8-e4m3": Case(27, [0, 17, 300], cache_dtype="fp8_e4m3", scales=E4M3_SCALES),
    "fp8-e5m2": Case(28, [0, 17, 300], cache_dtype="fp8_e5m2", scales=E5M2_SCALES),
    "fp8-unscaled": Case(29, [17], cache_dtype="fp8_e4m3"),
    "wide": Case(30, [17, 300], WIDE),
    "fp8-ds-mla": Case(31, [0, 17, 300], WIDE, cache_dtype="fp8_ds_mla"),
    "fp8-ds-mla-exact": Case(32, [17, 300], WIDE, cache_dtype="fp8_ds_mla", tile_scale="exact"),
    "one-dump": Case(34, [3, 17, 40], together=True),
    "k3-layer": Case(33, [1, 300], K3_LAYER, "kimi-k3", columns=16),
}


# --------------------------------------------------------------------------------------------------
# Noise: the same roundings with other sums
# --------------------------------------------------------------------------------------------------

# The first three differ from the twin by the order of sums alone.
VARIANTS = {"fp64": SumsF64(), "backwards": SumsInStrips(32, True),
            "in order": SumsInStrips(2, False),
            "normalised": SumsNormalised(), "in pieces": SumsInPieces()}
ORDERS = ["fp64", "backwards", "in order"]
NUMBERS = ["attention_0", "layers", "hidden", "base_logits", "logits"]
MARGIN = 0.08   # of the logits' rms: what the greedy choice of a golden file is clear by, at least
TRIES = 4000


def off(a, b):
    """Largest row of |a - b|: its largest element and its rms, in units of the row's rms in a."""
    a, b = a.double(), b.double()
    rms = a.pow(2).mean(-1).sqrt()
    return (float(((a - b).abs().amax(-1) / rms).max()),
            float(((a - b).pow(2).mean(-1).sqrt() / rms).max()))


def margin(out):
    return float((out["top2_gap"] / out["logits"].float().pow(2).mean(-1).sqrt()).min())


def is_robust(case, dump_seed, anchors, out):
    """No rounding falls the other way with another order of sums (in a large model some always do),
    and no token with any variant."""
    if margin(out) < MARGIN:
        return False
    for name, sums in case.variants().items():
        other = case.run(dump_seed, anchors, sums)
        if not torch.equal(other["tokens"], out["tokens"]):
            return False
        if name not in ORDERS or case.is_large():
            continue
        if not all(torch.equal(other[k], out[k]) for k in ("layers", "hidden")):
            return False
    return True


def find_dump(case, anchors, first):
    """The first seed whose results do not hang on a hair; (seed, results)."""
    for dump_seed in range(first, first + TRIES):
        out = case.run(dump_seed, anchors)
        if is_robust(case, dump_seed, anchors, out):
            return dump_seed, out
    raise SystemExit("no robust dump in %d seeds" % TRIES)


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


def make_case(name):
    case = CASES[name]
    groups = [case.anchors] if case.together else [[s] for s in case.anchors]
    seeds, outs = [], []
    for group in groups:
        dump_seed, out = find_dump(case, group, 1000 * case.seed)
        seeds += [dump_seed] * len(group)
        out["hidden_normalised"] = case.run(dump_seed, group, SumsNormalised())["hidden"]
        outs.append(out)
    tensors = {k: torch.cat([o[k] for o in outs]) for k in outs[0]}
    tensors["dump_seeds"] = torch.tensor(seeds)
    tensors["layer_0"] = tensors.pop("layers")[:, 0]
    for k in ("hidden", "hidden_normalised", "layer_0", "heads_0", "attention_0"):
        tensors[k] = tensors[k][..., :: case.columns]
    about = {"preset": case.preset, "settings": "\n".join(case.settings), "seed": str(case.seed),
             "first_position": str(case.first_position),
             "target": "" if case.is_large() else case.target(),
             "target_seed": str(TARGET_SEED), "cache_dtype": case.cache_dtype,
             "scales": "\n".join(repr(s) for s in case.scales or []),
             "tile_scale": case.tile_scale, "columns": str(case.columns),
             "greedy_margin": "%.4f" % margin(tensors),
             "script": "tools/oracle/draft_golden.py " + name}
    return tensors, about


def write_target(directory, case):
    h, vocab = case.config["hidden_size"], case.config["vocab_size"]
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "config.json"), "w") as f:
        json.dump({"model_type": "made_up", "hidden_size": h, "vocab_size": vocab,
                   "num_hidden_layers": case.config["target_num_hidden_layers"]}, f, indent=2)
        f.write("\n")
    tensors = {name: bf16_from_bits(generator.tensor(name, [vocab, h], TARGET_SEED))
               for name in ("embed_tokens.weight", "lm_head.weight")}
    save(os.path.join(directory, "model.safetensors"), tensors, {"seed": str(TARGET_SEED)})


def save(path, tensors, about):
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, about)
    with open(path, "r+b") as f:  # the metadata's order is random otherwise
        n = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(n))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= n
        f.seek(8)
        f.write(text.ljust(n))
    os.chmod(path, 0o644)
    print("%8d %s" % (os.path.getsize(path), path), flush=True)


def print_noise(names):
    """Each variant against the twin: largest element and rms of the worst row, share of elements
    that differ; rows of short contexts (one piece) and of long ones apart."""
    worst, count = {}, {}
    for name in names:
        case = CASES[name]
        for i, s in enumerate(case.anchors):
            for dump_seed in range(5000, 5000 + (1 if case.is_large() else SAMPLES)):
                out = case.run(dump_seed, [s])
                for variant, sums in case.variants().items():
                    note(worst, count, (variant, s + case.n() > 240), out,
                         case.run(dump_seed, [s], sums))
    for (variant, is_long), w in sorted(worst.items()):
        print("%-10s %s " % (variant, "long " if is_long else "short")
              + "  ".join("%s %.3f %.3f %4.1f%%" % (k, *w[k][:2], 100 * w[k][2] / w[k][3])
                          for k in NUMBERS)
              + "  conf %.3f  %d of %d other tokens" % (w["conf"], *count[variant, is_long]))


def note(worst, count, key, out, other):
    w = worst.setdefault(key, {k: [0.0, 0.0, 0, 0] for k in NUMBERS} | {"conf": 0.0})
    n = count.setdefault(key, [0, 0])
    same = [int(a) for a in (out["tokens"] == other["tokens"])[0].int().cumprod(0)]
    upto = min(sum(same) + 1, len(same))  # rows whose previous token is the same
    n[0] += sum(same) < len(same)
    n[1] += 1
    for k in NUMBERS:
        a, b = out[k], other[k]
        if k == "logits":
            a, b = a[:, :upto], b[:, :upto]
        most, rms = off(a, b)
        w[k][0], w[k][1] = max(w[k][0], most), max(w[k][1], rms)
        w[k][2] += int((a != b).sum())
        w[k][3] += a.numel()
    if "confidence_logits" in out:
        d = (out["confidence_logits"] - other["confidence_logits"])[:, :upto].abs().max()
        w["conf"] = max(w["conf"], float(d))


def main():
    torch.set_num_threads(1)  # threads cut sums elsewhere
    args = sys.argv[1:]
    if args and args[0] == "--noise":
        print_noise(args[1:] or [n for n in CASES if not CASES[n].is_large()])
        return
    out_dir, names = args[0], args[1:]
    os.makedirs(out_dir, exist_ok=True)
    for name in names or CASES:
        case = CASES[name]
        directory = os.path.join(out_dir, case.target())
        if not case.is_large() and not os.path.exists(directory):
            write_target(directory, case)
        tensors, about = make_case(name)
        save(os.path.join(out_dir, name + ".safetensors"), tensors, about)


if __name__ == "__main__":
    main()
