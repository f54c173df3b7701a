#!/usr/bin/env python3
"""PyTorch twin of the context path: taps -> states -> one latent cache entry per layer.

    python3 tools/oracle/twin.py CKPT_DIR DUMP.safetensors OUT.safetensors [--tokens N] [--start P]

Written from the model's formulas, not from the C code. Products are summed in fp64 and rounded once
to bf16 where the served model rounds; norms and rotations are fp32 with one rounding at the store.
OUT holds `states` [n, h] and `entries` [L, n, C+R] (bf16), `positions` [n].
"""
import argparse
import glob
import json
import os

import numpy as np
import torch

import generator
from rope import Rope

ROWS = 256  # weight rows that are widened to fp64 at a time


def bf16_from_bits(bits):
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)


class SyntheticWeights:
    """Weights out of the generator, made row range by row range."""

    def __init__(self, seed):
        self.seed = seed

    def rows(self, name, shape, first, n):
        k = shape[-1]
        bits = generator.values(name, k, self.seed, first * k, n * k)
        return bf16_from_bits(bits).reshape(n, k)

    def vector(self, name, n):
        return bf16_from_bits(generator.values(name, n, self.seed, 0, n))


class FileWeights:
    """Weights of a checkpoint directory, through the safetensors package."""

    def __init__(self, directory):
        from safetensors import safe_open

        self.where = {}
        for path in sorted(glob.glob(os.path.join(directory, "*.safetensors"))):
            f = safe_open(path, framework="pt")
            for name in f.keys():
                self.where[name] = f

    def rows(self, name, shape, first, n):
        s = self.where[name].get_slice(name)
        if list(s.get_shape()) != list(shape):
            raise ValueError("%s: shape %s, config needs %s" % (name, s.get_shape(), shape))
        return s[first : first + n]

    def vector(self, name, n):
        t = self.where[name].get_tensor(name)
        if list(t.shape) != [n]:
            raise ValueError("%s: shape %s, config needs [%d]" % (name, list(t.shape), n))
        return t


def rms_norm_f32(x, weight, eps):
    """fp32 result before the store; x and weight bf16, last axis normed."""
    xf = x.float()
    mean = (xf.double() ** 2).mean(-1, keepdim=True).float()
    r = (1.0 / torch.sqrt((mean + torch.tensor(eps, dtype=torch.float32)).double())).float()
    return xf * r * weight.float()


def rms_norm_f64(x, weight, eps):
    mean = (x * x).mean(-1, keepdim=True)
    return x / torch.sqrt(mean + float(np.float32(eps))) * weight.double()


class Twin:
    def __init__(self, config, weights):
        self.c = config
        self.w = weights
        self.h = config["hidden_size"]
        self.n_layers = config["num_hidden_layers"]
        self.n_taps = len(config["target_layer_ids"])
        self.tap = config.get("target_hidden_size", self.h)
        self.latent = config["kv_lora_rank"]
        self.pe = config["qk_rope_head_dim"]
        self.eps = config["rms_norm_eps"]
        self.rope = Rope(config)

    def linear(self, name, n_out, inputs):
        """Each fp64 input [n, k] times one weight, fp64; the weight is made once for all."""
        k = inputs[0].shape[-1]
        outs = [torch.empty(x.shape[0], n_out, dtype=torch.float64) for x in inputs]
        for first in range(0, n_out, ROWS):
            n = min(ROWS, n_out - first)
            w = self.w.rows(name, [n_out, k], first, n).double().T
            for x, out in zip(inputs, outs):
                out[:, first : first + n] = x @ w
        return outs

    def run(self, taps, positions, with_f64=False):
        """taps [n, T*tap] bf16. Gives states, entries (bf16), entries_f32 (before the last
        rounding) and, when asked, entries_f64: the same without any rounding in between."""
        n = taps.shape[0]
        x, exact = taps, taps.double()
        if self.c.get("fc_norm"):
            parts, exact_parts = [], []
            for t in range(self.n_taps):
                w = self.w.vector("fc_norm.%d.weight" % t, self.tap)
                part = taps[:, t * self.tap : (t + 1) * self.tap]
                parts.append(rms_norm_f32(part, w, self.eps).bfloat16())
                exact_parts.append(rms_norm_f64(part.double(), w, self.eps))
            x, exact = torch.cat(parts, -1), torch.cat(exact_parts, -1)
        inputs = [x.double()] + ([exact] if with_f64 else [])
        projected = self.linear("context_proj.weight", self.h, inputs)
        w = self.w.vector("context_norm.weight", self.h)
        states = rms_norm_f32(projected[0].bfloat16(), w, self.eps).bfloat16()
        exact = rms_norm_f64(projected[1], w, self.eps) if with_f64 else None
        out = {"states": states, "positions": torch.as_tensor(positions, dtype=torch.int64)}
        out.update(self.entries(states, positions, exact))
        assert out["entries"].shape == (self.n_layers, n, self.latent + self.pe)
        return out

    def entries(self, states, positions, exact=None):
        cos, sin = (torch.from_numpy(t) for t in self.rope.table(positions))
        angles = torch.from_numpy(self.rope.angles(positions).astype(np.float64))
        attn = self.rope.attention_factor()
        rounded, f32, f64 = [], [], []
        for layer in range(self.n_layers):
            at = "layers.%d.self_attn." % layer
            inputs = [states.double()] + ([exact] if exact is not None else [])
            a = self.linear(at + "kv_a_proj_with_mqa.weight", self.latent + self.pe, inputs)
            w = self.w.vector(at + "kv_a_layernorm.weight", self.latent)
            u = a[0].bfloat16()
            kv = rms_norm_f32(u[:, : self.latent], w, self.eps)
            pe = u[:, self.latent :].float()
            e = torch.cat([kv, rotate(pe, cos, sin)], -1)
            f32.append(e)
            rounded.append(e.bfloat16())
            if exact is not None:
                kv = rms_norm_f64(a[1][:, : self.latent], w, self.eps)
                pe = rotate(a[1][:, self.latent :], angles.cos() * attn, angles.sin() * attn)
                f64.append(torch.cat([kv, pe], -1))
        out = {"entries": torch.stack(rounded), "entries_f32": torch.stack(f32)}
        if exact is not None:
            out["entries_f64"] = torch.stack(f64)
        return out


def rotate(v, cos, sin):
    """Interleaved pairs (2j, 2j+1); the result stays interleaved."""
    x, y = v[:, 0::2], v[:, 1::2]
    return torch.stack([x * cos - y * sin, y * cos + x * sin], -1).reshape(v.shape)


def load_taps(path, config, n_tokens=None):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as f:
        s = f.get_slice("hidden_states")
        n, n_states, width = s.get_shape()
        n_taps = len(config["target_layer_ids"])
        if n_states not in (n_taps, n_taps + 1):
            raise ValueError("%s: %d states, config needs %d or one more" % (path, n_states, n_taps))
        n = min(n, n_tokens) if n_tokens else n
        return s[:n][:, :n_taps, :].reshape(n, n_taps * width)


def main():
    from safetensors.torch import save_file

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("ckpt")
    p.add_argument("dump")
    p.add_argument("out")
    p.add_argument("--tokens", type=int, help="only the first N rows")
    p.add_argument("--start", type=int, default=0, help="position of the first row")
    a = p.parse_args()
    with open(os.path.join(a.ckpt, "config.json")) as f:
        config = json.load(f)
    taps = load_taps(a.dump, config, a.tokens)
    twin = Twin(config, FileWeights(a.ckpt))
    out = twin.run(taps, np.arange(a.start, a.start + taps.shape[0]))
    save_file({k: out[k].contiguous() for k in ("states", "entries", "positions")}, a.out)


if __name__ == "__main__":
    main()
