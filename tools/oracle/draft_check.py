#!/usr/bin/env python3
"""Do the golden files of tests/data/golden-draft notice a fault, and are they what they say?

    cd tools/oracle; GOLDEN=../../tests/data/golden-draft
    python3 draft_check.py GOLDEN faults               # break one convention at a time
    python3 draft_check.py GOLDEN naive                # again, unabsorbed, in fp64
    python3 draft_check.py GOLDEN files DSPARK DIR     # again, from files of `dspark synth`

`faults` runs every case with one convention of the twin broken and prints, over the drafts that
notice at all, how far the worst row of hidden states and of logits is off (rms of the difference in
units of the row's rms), the share of elements that differ, and how many have another token or
confidence. A fault of a rounding point shows in the shares only; every other one must be far beyond
the tolerances that draft_golden.py advises.

`naive` makes the hidden states once more in the textbook form: fp64 without any rounding, each head
with keys and values of its own, rotation as a product of complex numbers.

`files` makes each checkpoint and dump with DSPARK below DIR (1 GB with k3-layer), drafts from them,
and compares all bits with the golden file: the generator, the settings and the twin's way of
reading files. Checkpoints and dumps are all it takes from the C library.
"""
import math
import os
import subprocess
import sys

import torch

from draft import BF, Cache, DraftTwin, load_config, load_dump, open_target
from draft_golden import CASES, MARGIN, margin, off
from twin import FileWeights


class NeoxRope(DraftTwin):
    def rotate(self, v, positions):
        half = self.R // 2
        mixed = torch.stack([v[..., :half], v[..., half:]], -1).reshape(v.shape)
        out = super().rotate(mixed, positions)
        return torch.cat([out[..., 0::2], out[..., 1::2]], -1)


class RopeAtZero(DraftTwin):
    """Rows of the block all at the anchor's position."""

    def query_positions(self, position):
        return [position] * self.N


class RopeOneLate(DraftTwin):
    def query_positions(self, position):
        return [position + k + 1 for k in range(self.N)]


class PlainScale(DraftTwin):
    def softmax_scale(self):
        return (self.P + self.R) ** -0.5


class ScaleOnce(DraftTwin):
    """mscale instead of its square."""

    def softmax_scale(self):
        s = (self.P + self.R) ** -0.5
        return s * (super().softmax_scale() / s) ** 0.5


class ValuesFirst(DraftTwin):
    """kv_b's rows of a head the wrong way round."""

    def absorbed(self, layer):
        name = "layers.%d.self_attn.kv_b_proj.weight" % layer
        b = self.matrix(name, self.H * (self.P + self.V), self.C)
        b = b.reshape(self.H, self.P + self.V, self.C)
        return b[:, self.V :], b[:, : self.V]


class KeysOfAllHeadsFirst(DraftTwin):
    def absorbed(self, layer):
        name = "layers.%d.self_attn.kv_b_proj.weight" % layer
        b = self.matrix(name, self.H * (self.P + self.V), self.C)
        keys = b[: self.H * self.P].reshape(self.H, self.P, self.C)
        return keys, b[self.H * self.P :].reshape(self.H, self.V, self.C)


class OtherCausality(DraftTwin):
    def is_causal(self):
        return not super().is_causal()


class NoOwnRows(DraftTwin):
    """The block sees its context alone (and itself, where there is none)."""

    def mask(self, n_context):
        m = super().mask(n_context)
        if n_context:
            m[:, n_context:] = True
        return m


class ContextNormedTwice(DraftTwin):
    """input_layernorm over context rows too."""

    def context(self, taps, positions):
        self.in_context = True
        out = super().context(taps, positions)
        self.in_context = False
        return out

    def entries(self, a, layer, positions):
        if getattr(self, "in_context", False):
            a = self.norm(a, "layers.%d.input_layernorm.weight" % layer)
        return super().entries(a, layer, positions)


class OwnRowsUncached(DraftTwin):
    """The block's entries do not go through an fp8 cache."""

    def attention(self, a, layer, positions, context):
        kept, self.cache = self.cache, Cache()
        out = super().attention(a, layer, positions, context)
        self.cache = kept
        return out


class AnchorEverywhere(DraftTwin):
    def block_ids(self, anchor):
        return [anchor] * self.N


class MarkovFromAnchor(DraftTwin):
    def previous(self, anchor, tokens):
        return anchor


class MarkovTwoBack(DraftTwin):
    def previous(self, anchor, tokens):
        return ([anchor, anchor] + tokens)[len(tokens)]


class TargetsEmbedding(DraftTwin):
    def borrowed(self, name):
        return self.target.rows(name, [self.vocab, self.h], 0, self.vocab)


class NoLogitScale(DraftTwin):
    def scaled(self, logits):
        return logits.to(BF)


class RnnHiddenFirst(DraftTwin):
    def markov_input(self, e, hid, state):
        if self.c.get("markov_head_type") != "rnn":
            return super().markov_input(e, hid, state)
        z = self.with_bias(torch.cat([hid, e, state]), "markov_head.joint_proj", 3 * self.r)
        g, c, o = z.float().split(self.r)
        g, c = torch.sigmoid(g).to(BF), torch.tanh(c).to(BF)
        return torch.tanh(o).to(BF), g * state + (1 - g) * c


class RnnForgets(DraftTwin):
    def markov_input(self, e, hid, state):
        return super().markov_input(e, hid, torch.zeros_like(state))


class GateEmbeddingFirst(DraftTwin):
    def markov_input(self, e, hid, state):
        if self.c.get("markov_head_type") != "gated":
            return super().markov_input(e, hid, state)
        z = self.with_bias(torch.cat([e, hid]), "markov_head.gate_proj", self.r)
        return torch.sigmoid(z.float()).to(BF) * e, state


class ConfidenceEmbeddingFirst(DraftTwin):
    def confidence(self, hid, e):
        if not self.c.get("confidence_head_with_markov", True):
            return super().confidence(hid, e)
        w = self.matrix("confidence_head.proj.weight", 1, self.h + self.r)[0]
        logit = self.sums.product(torch.cat([e, hid])[None], w[None])[0, 0]
        return logit + self.w.vector("confidence_head.proj.bias", 1).float()[0]


class ConfidenceWithoutBias(DraftTwin):
    def confidence(self, hid, e):
        bias = self.w.vector("confidence_head.proj.bias", 1).float()[0]
        return super().confidence(hid, e) - bias


# ---- rounding points ----


class SiluUnrounded(DraftTwin):
    def silu(self, g):
        g = g.float()
        return g / (1 + torch.exp(-g))


class ResidualUnrounded(DraftTwin):
    """The stream stays fp32; norms read it so."""

    def add(self, a, b):
        return a.float() + b.float()

    def heads(self, hid, anchor):
        self.add = super().add  # logits are bf16 all the same
        return super().heads(hid, anchor)


class ProductUnrounded(DraftTwin):
    """gate and up stay fp32 until they are multiplied."""

    def mlp(self, b, layer):
        at = "layers.%d.mlp." % layer
        g = self.sums.product(b, self.matrix(at + "gate_proj.weight", self.F, self.h))
        u = self.sums.product(b, self.matrix(at + "up_proj.weight", self.F, self.h))
        act = (self.silu(g).float() * u).to(BF)
        return self.linear(act, at + "down_proj.weight", self.h)


class NormTwoRoundings(DraftTwin):
    """The normed value is rounded before the weight, as in training code."""

    def norm(self, x, name):
        xf = x.float()
        eps = torch.tensor(self.c["rms_norm_eps"], dtype=torch.float32)
        y = (xf * (self.sums.mean_square(xf) + eps).rsqrt()).to(BF)
        return (y.float() * self.w.vector(name, x.shape[-1]).float()).to(BF)


FAULTS = [k for k in list(globals().values())
          if isinstance(k, type) and issubclass(k, DraftTwin) and k is not DraftTwin]


def golden(directory, name):
    from safetensors import safe_open

    with safe_open(os.path.join(directory, name + ".safetensors"), framework="pt") as f:
        return {k: f.get_tensor(k) for k in f.keys()}, f.metadata()


def present(directory):
    return [n for n in CASES if os.path.exists(os.path.join(directory, n + ".safetensors"))]


def faults(directory):
    names = [n for n in present(directory) if not CASES[n].is_large()]
    files = {n: golden(directory, n)[0] for n in names}
    print("%-26s %5s %14s %14s %7s %7s" % ("fault", "cases", "hidden", "logits", "tokens", "conf."))
    for kind in FAULTS:
        touched, n_hidden, n_logits, total, total_logits = [], 0, 0, 0, 0
        tokens, conf, drafts, worst, worst_logits = 0, 0, 0, 0.0, 0.0
        for name in names:
            case, want = CASES[name], files[name]
            hit = False
            for i, (s, seed) in enumerate(zip(case.anchors, want["dump_seeds"].tolist())):
                got = {k: v[0] for k, v in case.run(seed, [s], kind=kind).items()}
                d = int((got["hidden"] != want["hidden"][i]).sum())
                e = int((got["logits"] != want["logits"][i]).sum())
                t = not torch.equal(got["tokens"], want["tokens"][i])
                c = "confidence" in want and float(
                    (got["confidence_logits"] - want["confidence_logits"][i]).abs().max()) > 0.06
                if not (d or e or t or c):
                    continue
                hit = True
                n_hidden, n_logits = n_hidden + d, n_logits + e
                total += got["hidden"].numel()
                total_logits += got["logits"].numel()
                tokens, conf, drafts = tokens + t, conf + c, drafts + 1
                worst = max(worst, off(want["hidden"][i], got["hidden"])[1])
                worst_logits = max(worst_logits, off(want["logits"][i], got["logits"])[1])
            if hit:
                touched.append(name)
        if not touched:
            raise SystemExit("%s: no golden file notices" % kind.__name__)
        print("%-26s %5d %7.3f %5.1f%% %7.3f %5.1f%% %3d/%-3d %3d/%-3d" % (
            kind.__name__, len(touched), worst, 100 * n_hidden / total, worst_logits,
            100 * n_logits / total_logits, tokens, drafts, conf, drafts), flush=True)


# ---- the textbook form ----


class Naive:
    """hid of one draft, loops over heads and rows; shares only the weights with the twin."""

    def __init__(self, case):
        self.case, self.c, self.twin = case, case.config, case.twin()

    def weight(self, name, *shape):
        if len(shape) == 1:
            return self.twin.w.vector(name, shape[0]).double()
        return self.twin.w.rows(name, list(shape), 0, shape[0]).double()

    def norm(self, x, name):
        n = x.shape[-1]
        rms = ((x * x).sum(-1, keepdim=True) / n + self.c["rms_norm_eps"]).sqrt()
        return x / rms * self.weight(name, n)

    def turn(self, v, position):
        """The angle is the fp32 product, as it is defined."""
        angle = torch.from_numpy(self.twin.rope.angles([position])[0]).double()
        z = torch.complex(v[0::2], v[1::2]) * torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(z * self.twin.rope.attention_factor()).reshape(-1)

    def latents(self, a, at, positions):
        """[n, h] -> (normed latents, turned rope keys)."""
        latent, rope = self.c["kv_lora_rank"], self.c["qk_rope_head_dim"]
        name = at + "kv_a_proj_with_mqa.weight"
        u = a @ self.weight(name, latent + rope, a.shape[-1]).T
        keys = [self.turn(row[latent:], p) for row, p in zip(u, positions)]
        return self.norm(u[:, :latent], at + "kv_a_layernorm.weight"), torch.stack(keys)

    def attend(self, a, states, at, first, start):
        c, n = self.c, a.shape[0]
        heads, p, v = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"]
        r, latent, rank = c["qk_rope_head_dim"], c["kv_lora_rank"], c["q_lora_rank"]
        own, own_pe = self.latents(a, at, range(start, start + n))
        if len(states):
            old, old_pe = self.latents(states, at, range(first, start))
            own, own_pe = torch.cat([old, own]), torch.cat([old_pe, own_pe])
        q = self.norm(a @ self.weight(at + "q_a_proj.weight", rank, a.shape[-1]).T,
                      at + "q_a_layernorm.weight")
        q = q @ self.weight(at + "q_b_proj.weight", heads * (p + r), rank).T
        b = self.weight(at + "kv_b_proj.weight", heads * (p + v), latent)
        rope = c.get("rope_parameters") or {}
        scale = 1 / (p + r) ** 0.5
        if rope.get("rope_type") == "yarn":
            scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2
        out = torch.zeros(n, heads * v, dtype=torch.float64)
        for head in range(heads):
            of_head = b[head * (p + v) : (head + 1) * (p + v)]
            keys = torch.cat([own @ of_head[:p].T, own_pe], -1)
            values = own @ of_head[p:].T
            for i in range(n):
                qh = q[i, head * (p + r) : (head + 1) * (p + r)]
                qh = torch.cat([qh[:p], self.turn(qh[p:], start + i)])
                seen = len(states) + (i + 1 if c.get("is_causal") else n)
                s = torch.softmax(keys[:seen] @ qh * scale, 0)
                out[i, head * v : (head + 1) * v] = s @ values[:seen]
        return out @ self.weight(at + "o_proj.weight", a.shape[-1], heads * v).T

    def hidden(self, taps, ids, s, first):
        c, h, f = self.c, self.c["hidden_size"], self.c["intermediate_size"]
        x, width = taps[:s].double(), c["target_hidden_size"]
        if c.get("fc_norm"):
            x = torch.cat([self.norm(x[:, t * width : (t + 1) * width], "fc_norm.%d.weight" % t)
                           for t in range(x.shape[1] // width)], -1)
        states = x @ self.weight("context_proj.weight", h, taps.shape[1]).T
        states = self.norm(states, "context_norm.weight") if s else states
        rows = [int(ids[s])] + [c["mask_token_id"]] * (c.get("block_size", 7) - 1)
        x = self.twin.borrowed("embed_tokens.weight")[rows].double()
        for layer in range(c["num_hidden_layers"]):
            at = "layers.%d." % layer
            a = self.norm(x, at + "input_layernorm.weight")
            x = x + self.attend(a, states, at + "self_attn.", first, first + s)
            b = self.norm(x, at + "post_attention_layernorm.weight")
            g = b @ self.weight(at + "mlp.gate_proj.weight", f, h).T
            u = b @ self.weight(at + "mlp.up_proj.weight", f, h).T
            x = x + (g * torch.sigmoid(g) * u) @ self.weight(at + "mlp.down_proj.weight", h, f).T
        return self.norm(x, "final_norm.weight")


def naive(directory):
    for name in present(directory):
        case, (want, _) = CASES[name], golden(directory, name)
        if case.cache_dtype != "bf16":
            continue
        most = 0.0
        for i, s in enumerate(case.anchors):
            taps, ids = case.dump(int(want["dump_seeds"][i]), s + 1)
            got = Naive(case).hidden(taps, ids, s, case.first_position)
            most = max(most, off(got[:, :: case.columns], want["hidden"][i])[1])
        print("%-18s worst row: rms of the difference %.4f" % (name, most), flush=True)
        if most > 0.1:
            raise SystemExit("%s: too far" % name)


def files(directory, dspark, scratch):
    os.makedirs(scratch, exist_ok=True)
    for name in present(directory):
        want, about = golden(directory, name)
        ckpt, dump = os.path.join(scratch, name), os.path.join(scratch, name + ".dump.safetensors")
        if not os.path.exists(ckpt):
            sets = [x for line in about["settings"].splitlines() for x in ("--set", line)]
            subprocess.run([dspark, "synth", ckpt, "--preset", about["preset"], "--seed",
                            about["seed"], *sets], check=True, stdout=subprocess.DEVNULL)
        config = load_config(ckpt)
        if about["target"]:
            target = open_target(os.path.join(directory, about["target"]))
        else:
            target = CASES[name].twin().target
        scales = [float(s) for s in about["scales"].splitlines()] or None
        twin = DraftTwin(config, FileWeights(ckpt), target,
                         cache=Cache(about["cache_dtype"], scales, about["tile_scale"]))
        for i, s in enumerate(want["anchor_positions"].tolist()):
            subprocess.run([dspark, "synth", "--dump", dump, "--for", ckpt, "--tokens", str(s + 1),
                            "--seed", str(int(want["dump_seeds"][i]))], check=True,
                           stdout=subprocess.DEVNULL)
            got = twin.run(*load_dump(dump, config), [s], int(about["first_position"]))
            os.unlink(dump)
            got["layer_0"] = got.pop("layers")[:, 0]
            for k in got:
                a, b = got[k][0], want[k][i]
                if a.shape != b.shape:
                    a = a[..., :: int(about["columns"])]
                if not torch.equal(a, b):
                    raise SystemExit("%s, anchor %d: %s differs" % (name, s, k))
        if margin(want) < MARGIN:
            raise SystemExit("%s: margin" % name)
        print("%s: %d drafts, all bits equal" % (name, len(want["tokens"])), flush=True)


def main():
    torch.set_num_threads(1)
    if len(sys.argv) == 3 and sys.argv[2] == "faults":
        faults(sys.argv[1])
    elif len(sys.argv) == 3 and sys.argv[2] == "naive":
        naive(sys.argv[1])
    elif len(sys.argv) == 5 and sys.argv[2] == "files":
        files(sys.argv[1], *sys.argv[3:])
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
