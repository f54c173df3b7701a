#!/usr/bin/env python3
"""PyTorch twin of the whole draft step: taps -> context entries -> block -> heads -> tokens.

    python3 tools/oracle/draft.py CKPT_DIR TARGET DUMP.safetensors OUT.safetensors
            [--anchor-position S]... [--first-position P]
            [--cache-dtype bf16|fp8_e4m3|fp8_e5m2|fp8_ds_mla] [--scale F]...
            [--tile-scale pow2|exact]

Written from the model's formulas, not from the C code. Tensors are torch bf16 and are rounded
where the served model rounds; a product of two bf16 matrices is made in fp32 by torch and rounded
once. Attention is the absorbed form: the softmax is fp32 over the whole row at once, its terms are
rounded to bf16 before they meet the latents. TARGET is a directory or a file with `lm_head.weight`
and `embed_tokens.weight` [vocab, h]; what the checkpoint itself has wins.

The context of anchor position S is the dump's rows below S, the anchor is token S; row i of the
dump has position P + i. OUT: see draft_golden.py, which lists the tensors.

The small methods of DraftTwin are one convention each, so that draft_check.py can break them one by
one and see that the golden files notice.
"""
import argparse
import json
import math
import os

import torch

from rope import Rope
from twin import FileWeights, load_taps

BF = torch.bfloat16


# --------------------------------------------------------------------------------------------------
# Arithmetic: one class a way of summing. All give fp32, rounded to bf16 by the caller.
# --------------------------------------------------------------------------------------------------


class Sums:
    """Products by torch in fp32. exp(s - max) over the whole row is rounded to bf16 before it meets
    the values; the fp32 sum of the unrounded divides at the end, as fused kernels do it."""

    def product(self, x, w):
        """x [.., k] times w [.., n, k] transposed."""
        return x.float() @ w.float().transpose(-1, -2)

    def mean_square(self, xf):
        return (xf * xf).mean(-1, keepdim=True)

    def attend(self, scores, values):
        """scores [H, N, n] fp32, masked with -inf; values [n, C] bf16."""
        p = torch.exp(scores - scores.amax(-1, keepdim=True))
        return self.product(p.to(BF), values.T) / p.sum(-1, keepdim=True)


class SumsNormalised(Sums):
    """A plain softmax: probabilities are divided first and then rounded."""

    def attend(self, scores, values):
        return self.product(torch.softmax(scores, -1).to(BF), values.T)


class SumsF64(Sums):
    """The same roundings, every sum in fp64."""

    def product(self, x, w):
        return (x.double() @ w.double().transpose(-1, -2)).float()

    def mean_square(self, xf):
        return (xf.double() ** 2).mean(-1, keepdim=True).float()

    def attend(self, scores, values):
        p = torch.exp((scores - scores.amax(-1, keepdim=True)).double()).float()
        return self.product(p.to(BF), values.T) / p.double().sum(-1, keepdim=True).float()


class SumsInStrips(Sums):
    """fp32, strips of k added up one by one, from the start or from the end."""

    def __init__(self, width, backwards):
        self.width, self.backwards = width, backwards

    def product(self, x, w):
        x, w = x.float(), w.float().transpose(-1, -2)
        strips = [(x[..., at : at + self.width], w[..., at : at + self.width, :])
                  for at in range(0, x.shape[-1], self.width)]
        out = 0
        for a, b in reversed(strips) if self.backwards else strips:
            out = out + a @ b
        return out


class SumsInPieces(Sums):
    """The row of scores goes by in pieces, each with the maximum so far: other bf16 roundings."""

    def __init__(self, width=240):
        self.width = width

    def attend(self, scores, values):
        m = torch.full(scores.shape[:-1] + (1,), float("-inf"))
        total, out = torch.zeros_like(m), 0
        for at in range(0, scores.shape[-1], self.width):
            s = scores[..., at : at + self.width]
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            shrink = torch.exp(m - new)
            p = torch.exp(s - new)
            total = total * shrink + p.sum(-1, keepdim=True)
            out = out * shrink + self.product(p.to(BF), values[at : at + self.width].T)
            m = new
        return out / total


# --------------------------------------------------------------------------------------------------
# Caches: what an entry is after it went in and came out
# --------------------------------------------------------------------------------------------------


class Cache:
    def __init__(self, dtype="bf16", scales=None, tile_scale="pow2"):
        self.dtype, self.scales, self.tile_scale = dtype, scales, tile_scale

    @staticmethod
    def through(x, scale, kind, largest):
        """bf16 -> code -> bf16; x / scale saturates, rounding is to nearest even."""
        codes = (x.float() / scale).clamp(-largest, largest).to(kind)
        return (codes.float() * scale).to(BF)

    def tile_scales(self, tiles):
        """tiles [n, 4, 128]."""
        s = tiles.float().abs().amax(-1, keepdim=True) / 448.0
        if self.tile_scale == "exact":
            return s.clamp(min=torch.finfo(torch.float32).tiny)
        mantissa, exponent = torch.frexp(s.clamp(min=1e-4))
        # frexp: s = mantissa * 2^exponent with mantissa in [0.5, 1); 0.5 is a power of two itself
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        return torch.ldexp(torch.ones_like(s), exponent)

    def entry(self, e, layer, latent):
        """e [n, C + R] bf16."""
        scale = torch.tensor(self.scales[layer] if self.scales else 1.0, dtype=torch.float32)
        if self.dtype == "bf16":
            return e
        if self.dtype == "fp8_e4m3":
            return self.through(e, scale, torch.float8_e4m3fn, 448.0)
        if self.dtype == "fp8_e5m2":
            return self.through(e, scale, torch.float8_e5m2, 57344.0)
        if self.dtype != "fp8_ds_mla" or latent != 512 or e.shape[-1] != 576:
            raise ValueError("cache dtype %r for entries of %d" % (self.dtype, e.shape[-1]))
        tiles = e[:, :512].reshape(-1, 4, 128)
        back = self.through(tiles, self.tile_scales(tiles), torch.float8_e4m3fn, 448.0)
        return torch.cat([back.reshape(-1, 512), e[:, 512:]], -1)


# --------------------------------------------------------------------------------------------------
# The drafter
# --------------------------------------------------------------------------------------------------


class DraftTwin:
    def __init__(self, config, weights, target=None, sums=None, cache=None):
        """weights, target: objects with rows(name, shape, first, n) and vector(name, n), and
        `where` (the names they hold)."""
        c = config
        self.c, self.w, self.target = c, weights, target
        self.sums, self.cache = sums or Sums(), cache or Cache()
        self.h, self.F, self.L = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
        self.H, self.Rq, self.C = c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
        self.P, self.R, self.V = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        self.vocab, self.r = c["vocab_size"], c["markov_rank"]
        self.T, self.tap = len(c["target_layer_ids"]), c.get("target_hidden_size", self.h)
        self.N = c.get("block_size", 7)
        self.rope = Rope(c)
        self.scale = torch.tensor(self.softmax_scale(), dtype=torch.float32)

    # ---- weights ----

    def matrix(self, name, n_out, k):
        return self.w.rows(name, [n_out, k], 0, n_out)

    def borrowed(self, name):
        w = self.w if name in self.w.where else self.target
        return w.rows(name, [self.vocab, self.h], 0, self.vocab)

    # ---- conventions ----

    def softmax_scale(self):
        scale = (self.P + self.R) ** -0.5
        if self.rope.kind == "yarn" and self.rope.factor > 1:
            m = 0.1 * self.rope.mscale_all_dim * math.log(self.rope.factor) + 1.0
            scale *= m * m
        return scale

    def norm(self, x, name):
        """fp32 inside, one rounding at the store."""
        xf = x.float()
        eps = torch.tensor(self.c["rms_norm_eps"], dtype=torch.float32)
        r = (self.sums.mean_square(xf) + eps).rsqrt()
        return (xf * r * self.w.vector(name, x.shape[-1]).float()).to(BF)

    def linear(self, x, name, n_out):
        return self.sums.product(x, self.matrix(name, n_out, x.shape[-1])).to(BF)

    def rotate(self, v, positions):
        """v [n, .., R] bf16: interleaved pairs (2j, 2j + 1) stay where they are."""
        cos, sin = (torch.from_numpy(t) for t in self.rope.table(positions))
        shape = [len(positions)] + [1] * (v.dim() - 2) + [self.R // 2]
        cos, sin = cos.reshape(shape), sin.reshape(shape)
        x, y = v[..., 0::2].float(), v[..., 1::2].float()
        return torch.stack([x * cos - y * sin, y * cos + x * sin], -1).reshape(v.shape).to(BF)

    def add(self, a, b):
        return (a.float() + b.float()).to(BF)

    def silu(self, g):
        """Rounded before it meets u."""
        g = g.float()
        return (g / (1 + torch.exp(-g))).to(BF)

    def absorbed(self, layer):
        """W_UK [H, P, C] and W_UV [H, V, C]: of each head's rows of kv_b, keys come first."""
        name = "layers.%d.self_attn.kv_b_proj.weight" % layer
        b = self.matrix(name, self.H * (self.P + self.V), self.C)
        b = b.reshape(self.H, self.P + self.V, self.C)
        return b[:, : self.P], b[:, self.P :]

    def is_causal(self):
        c = self.c
        if c.get("is_causal") is not None:
            return bool(c["is_causal"])
        if (c.get("dflash_config") or {}).get("causal") is not None:
            return bool(c["dflash_config"]["causal"])
        return "sliding_attention" in (c.get("layer_types") or [])

    def mask(self, n_context):
        """[N, n_context + N], true where a row must not look."""
        m = torch.zeros(self.N, n_context + self.N, dtype=torch.bool)
        if self.is_causal():
            m[:, n_context:] = torch.ones(self.N, self.N, dtype=torch.bool).triu(1)
        return m

    def query_positions(self, position):
        return [position + k for k in range(self.N)]

    def previous(self, anchor, tokens):
        """The token before the next one."""
        return tokens[-1] if tokens else anchor

    def block_ids(self, anchor):
        return [anchor] + [self.c["mask_token_id"]] * (self.N - 1)

    # ---- context ----

    def context(self, taps, positions):
        """taps [n, T * tap] bf16 -> for each layer [n, C + R] bf16, as a cache gives them back."""
        if self.c.get("fc_norm"):
            parts = taps.split(self.tap, -1)
            parts = [self.norm(p, "fc_norm.%d.weight" % t) for t, p in enumerate(parts)]
            taps = torch.cat(parts, -1)
        states = self.norm(self.linear(taps, "context_proj.weight", self.h), "context_norm.weight")
        return [self.entries(states, layer, positions) for layer in range(self.L)]

    def entries(self, a, layer, positions):
        """Both kinds of row: context states as they are, block rows after input_layernorm."""
        at = "layers.%d.self_attn." % layer
        u = self.linear(a, at + "kv_a_proj_with_mqa.weight", self.C + self.R)
        kv = self.norm(u[:, : self.C], at + "kv_a_layernorm.weight")
        e = torch.cat([kv, self.rotate(u[:, self.C :], positions)], -1)
        return self.cache.entry(e, layer, self.C)

    # ---- block ----

    def attention(self, a, layer, positions, context):
        """a [N, h] normed -> [N, h], and its heads before o_proj [N, H * V]."""
        at = "layers.%d.self_attn." % layer
        entries = torch.cat([context, self.entries(a, layer, positions)])
        qc = self.norm(self.linear(a, at + "q_a_proj.weight", self.Rq),
                       at + "q_a_layernorm.weight")
        q = self.linear(qc, at + "q_b_proj.weight", self.H * (self.P + self.R))
        q = q.reshape(self.N, self.H, self.P + self.R)
        q_pe = self.rotate(q[..., self.P :], positions)
        w_uk, w_uv = self.absorbed(layer)
        ql = self.sums.product(q[..., : self.P].transpose(0, 1), w_uk.transpose(1, 2)).to(BF)
        query = torch.cat([ql, q_pe.transpose(0, 1)], -1)  # [H, N, C + R]
        scores = self.sums.product(query, entries) * self.scale
        scores = scores.masked_fill(self.mask(len(context)), float("-inf"))
        lat = self.sums.attend(scores, entries[:, : self.C]).to(BF)  # [H, N, C]
        out = self.sums.product(lat, w_uv).to(BF)  # [H, N, V]
        out = out.transpose(0, 1).reshape(self.N, self.H * self.V)
        return self.linear(out, at + "o_proj.weight", self.h), out

    def mlp(self, b, layer):
        at = "layers.%d.mlp." % layer
        g = self.linear(b, at + "gate_proj.weight", self.F)
        u = self.linear(b, at + "up_proj.weight", self.F)
        act = (self.silu(g).float() * u.float()).to(BF)
        return self.linear(act, at + "down_proj.weight", self.h)

    def block(self, anchor, position, contexts, trace):
        """contexts: one [n, C + R] a layer -> hid [N, h]."""
        x = self.borrowed("embed_tokens.weight")[self.block_ids(anchor)]
        positions, layers = self.query_positions(position), []
        for layer in range(self.L):
            at = "layers.%d." % layer
            a = self.norm(x, at + "input_layernorm.weight")
            o, heads = self.attention(a, layer, positions, contexts[layer])
            if layer == 0:
                trace["heads_0"], trace["attention_0"] = heads, o
            x = self.add(o, x)
            x = self.add(self.mlp(self.norm(x, at + "post_attention_layernorm.weight"), layer), x)
            layers.append(x)
        trace["layers"] = torch.stack(layers)
        return self.norm(x, "final_norm.weight")

    # ---- heads ----

    def scaled(self, logits):
        """logits fp32: the product is rounded, then scaled and rounded again."""
        logits, scale = logits.to(BF), self.c.get("logit_scale", 1.0)
        return logits if scale == 1.0 else (logits.float() * scale).to(BF)

    def with_bias(self, x, name, n_out):
        """The bias joins the fp32 sum before the one rounding."""
        w = self.matrix(name + ".weight", n_out, x.shape[-1])
        return (self.sums.product(x, w) + self.w.vector(name + ".bias", n_out).float()).to(BF)

    def markov_input(self, e, hid, state):
        """e [r] of the token before, hid [h] -> what W2 multiplies, the next state."""
        kind = self.c.get("markov_head_type", "vanilla")
        if kind == "vanilla":
            return e, state
        if kind == "gated":
            z = self.with_bias(torch.cat([hid, e]), "markov_head.gate_proj", self.r)
            return torch.sigmoid(z.float()).to(BF) * e, state
        if kind != "rnn":
            raise ValueError("markov_head_type %r" % kind)
        z = self.with_bias(torch.cat([state, e, hid]), "markov_head.joint_proj", 3 * self.r)
        g, c, o = z.float().split(self.r)
        g, c = torch.sigmoid(g).to(BF), torch.tanh(c).to(BF)
        return torch.tanh(o).to(BF), g * state + (1 - g) * c  # bf16 tensors: each step rounds

    def confidence(self, hid, e):
        with_markov = self.c.get("confidence_head_with_markov", True)
        x = torch.cat([hid, e]) if with_markov else hid
        w = self.matrix("confidence_head.proj.weight", 1, x.shape[-1])[0]
        logit = self.sums.product(x[None], w[None])[0, 0]
        if "confidence_head.proj.bias" in self.w.where:
            logit = logit + self.w.vector("confidence_head.proj.bias", 1).float()[0]
        return logit

    def heads(self, hid, anchor):
        base = self.scaled(self.sums.product(hid, self.borrowed("lm_head.weight")))
        w1 = self.matrix("markov_head.markov_w1.weight", self.vocab, self.r)
        w2 = self.matrix("markov_head.markov_w2.weight", self.vocab, self.r)
        tokens, rows, logits, state = [], [], [], torch.zeros(self.r, dtype=BF)
        for i in range(self.N):
            e = w1[self.previous(anchor, tokens)]
            x, state = self.markov_input(e, hid[i], state)
            row = self.add(base[i], self.scaled(self.sums.product(x[None], w2)[0]))
            rows.append(row)
            if self.c.get("enable_confidence_head"):
                logits.append(self.confidence(hid[i], e))
            best = torch.nonzero(row == row.max())[0, 0]  # the lowest index of a tie
            tokens.append(int(best))
        top = torch.stack(rows).float().topk(2, -1).values
        out = {"base_logits": base, "logits": torch.stack(rows), "tokens": torch.tensor(tokens),
               "top2_gap": top[:, 0] - top[:, 1]}
        if logits:
            out["confidence_logits"] = torch.stack(logits)
            out["confidence"] = torch.sigmoid(out["confidence_logits"])
        return out

    # ---- all of it ----

    def draft(self, anchor, position, contexts):
        out = {}
        out["hidden"] = self.block(anchor, position, contexts, out)
        out.update(self.heads(out["hidden"], anchor))
        return out

    def run(self, taps, token_ids, anchors, first_position=0):
        """One draft an anchor position (a row of the dump); results stacked."""
        n = max(anchors)
        entries = self.context(taps[:n], [first_position + i for i in range(n)])
        outs = [self.draft(int(token_ids[s]), first_position + s, [e[:s] for e in entries])
                for s in anchors]
        out = {k: torch.stack([o[k] for o in outs]) for k in outs[0]}
        out["anchor_positions"] = torch.tensor(anchors)
        out["anchor_tokens"] = torch.tensor([int(token_ids[s]) for s in anchors])
        return out


def open_target(path):
    w = FileWeights(path)
    if not w.where:
        from safetensors import safe_open

        f = safe_open(path, framework="pt")
        w.where = {name: f for name in f.keys()}
    return w


def load_dump(path, config):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as f:
        return load_taps(path, config), f.get_tensor("token_ids")


def load_config(directory):
    with open(os.path.join(directory, "config.json")) as f:
        return json.load(f)


def main():
    from safetensors.torch import save_file

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("ckpt")
    p.add_argument("target")
    p.add_argument("dump")
    p.add_argument("out")
    p.add_argument("--anchor-position", type=int, action="append", help="default: the last row")
    p.add_argument("--first-position", type=int, default=0, help="position of the dump's first row")
    p.add_argument("--cache-dtype", default="bf16")
    p.add_argument("--scale", type=float, action="append", help="of a layer, or once for all")
    p.add_argument("--tile-scale", default="pow2")
    a = p.parse_args()
    config = load_config(a.ckpt)
    taps, token_ids = load_dump(a.dump, config)
    scales = a.scale
    if scales and len(scales) == 1:
        scales = scales * config["num_hidden_layers"]
    twin = DraftTwin(config, FileWeights(a.ckpt), open_target(a.target),
                     cache=Cache(a.cache_dtype, scales, a.tile_scale))
    out = twin.run(taps, token_ids, a.anchor_position or [len(token_ids) - 1], a.first_position)
    save_file({k: v.contiguous() for k, v in out.items()}, a.out)
    for i, s in enumerate(out["anchor_positions"]):
        print(int(s), int(out["anchor_tokens"][i]), out["tokens"][i].tolist(),
              [round(float(x), 4) for x in out["confidence"][i]] if "confidence" in out else "")


if __name__ == "__main__":
    main()
