#!/usr/bin/env python3
"""Context KV by PyTorch's bf16 CPU operators, side by side with libdspark in one process.

PyTorch does the sequence that the one pass replaces: per layer the full Q+KV projection (2112 rows), split,
RMSNorm over 512, interleaved RoPE on 64, index_copy into a paged cache; and two variants that a careful user
would write, five 576-row projections and a single 2880-row one. libdspark does its three paths. Contenders take
turns round by round, with cold weights: the caches are flushed before every timed call, the same way for all.

Not part of any build or test. Needs PyTorch (PyPI) and, for the check of results, safetensors.

    build/release/dspark synth build/k3 --preset kimi-k3 --context-only
    python3 bench/peers/pytorch_context.py build/k3 --csv bench.csv

Without a checkpoint only PyTorch is timed, on random weights of Kimi-K3's shapes.
"""
import argparse
import json
import math
import os
import sys

from side_by_side import SLOTS, Dspark, Flush, Table, add_arguments, measure, parse, skip


def import_torch():
    """Late, so that --help works without it and its absence is one line."""
    global torch, F
    try:
        import torch
        import torch.nn.functional as F
    except ImportError as e:
        skip(f"pytorch_context.py: PyTorch cannot be imported ({e}); python3 -m pip install torch")


# ---- the model's shapes and weights, for PyTorch -------------------------------------------------


class Shapes:
    def __init__(self, config):
        self.hidden = config.get("hidden_size", 7168)
        self.layers = config.get("num_hidden_layers", 5)
        self.q = config.get("q_lora_rank", 1536)
        self.latent = config.get("kv_lora_rank", 512)
        self.rope = config.get("qk_rope_head_dim", 64)
        self.eps = config.get("rms_norm_eps", 1e-5)
        self.kv = self.latent + self.rope
        self.rope_config = config.get("rope_parameters") or {}
        self.theta = self.rope_config.get("rope_theta", config.get("rope_theta", 50000.0))

    def frequencies(self):
        """fp32 frequencies; attn factor 1 is assumed (mscale = mscale_all_dim)."""
        half = self.rope // 2
        power = torch.tensor([self.theta ** (2 * i / self.rope) for i in range(half)], dtype=torch.float64).float()
        own = 1.0 / power
        r = self.rope_config
        if r.get("rope_type", "default") == "default":
            return own
        orig, factor = r["original_max_position_embeddings"], float(r["factor"])

        def turn(t):
            return self.rope * math.log(orig / (t * 2 * math.pi)) / (2 * math.log(self.theta))

        low = max(math.floor(turn(r.get("beta_fast", 32))), 0)
        high = min(math.ceil(turn(r.get("beta_slow", 1))), self.rope - 1)
        span = high - low or 0.001
        keep = 1 - ((torch.arange(half, dtype=torch.float32) - low) / span).clamp(0, 1)
        return 1.0 / (factor * power) * (1 - keep) + own * keep


def load_weights(shapes, checkpoint):
    """Per layer [q + kv, h] and the norm row: the checkpoint's, or random ones."""
    g = torch.Generator().manual_seed(1)
    full, norm = [], []
    reader = None
    if checkpoint:
        try:
            from safetensors import safe_open

            path = os.path.join(checkpoint, "model.safetensors")
            reader = safe_open(path, "pt") if os.path.exists(path) else None
        except ImportError:
            pass
    for layer in range(shapes.layers):
        if reader is not None:
            pre = f"layers.{layer}.self_attn."
            full.append(torch.cat([reader.get_tensor(pre + "q_a_proj.weight"),
                                   reader.get_tensor(pre + "kv_a_proj_with_mqa.weight")]))
            norm.append(reader.get_tensor(pre + "kv_a_layernorm.weight").clone())
        else:
            w = torch.randn(shapes.q + shapes.kv, shapes.hidden, generator=g) * shapes.hidden**-0.5
            full.append(w.bfloat16())
            norm.append(torch.ones(shapes.latent, dtype=torch.bfloat16))
    return full, norm, reader is not None


class TorchContext:
    """The replaced sequence and its two narrower variants on PyTorch operators."""

    def __init__(self, shapes, checkpoint):
        self.s = shapes
        self.full, self.norm, self.real = load_weights(shapes, checkpoint)
        self.narrow = [w[shapes.q:].clone() for w in self.full]
        self.fused = torch.cat(self.narrow)
        self.other = torch.randn_like(self.fused)  # for wake()
        self.freq = shapes.frequencies()
        self.cache = [torch.zeros(SLOTS, shapes.kv, dtype=torch.bfloat16) for _ in range(shapes.layers)]

    def finish(self, layer, latent, key, cos, sin, slots):
        s = self.s
        latent = F.rms_norm(latent, (s.latent,), self.norm[layer], s.eps)
        x = key.float().view(-1, s.rope // 2, 2)
        a, b = x[..., 0], x[..., 1]
        key = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).bfloat16()
        self.cache[layer].index_copy_(0, slots, torch.cat((latent, key), -1))

    def angles(self, positions):
        angle = positions.float()[:, None] * self.freq
        return angle.cos(), angle.sin()

    def run_full(self, x, positions, slots):
        cos, sin = self.angles(positions)
        for layer, w in enumerate(self.full):
            _, latent, key = F.linear(x, w).split((self.s.q, self.s.latent, self.s.rope), -1)
            self.finish(layer, latent, key, cos, sin, slots)

    def run_narrow(self, x, positions, slots):
        cos, sin = self.angles(positions)
        for layer, w in enumerate(self.narrow):
            latent, key = F.linear(x, w).split((self.s.latent, self.s.rope), -1)
            self.finish(layer, latent, key, cos, sin, slots)

    def run_fused(self, x, positions, slots):
        cos, sin = self.angles(positions)
        y = F.linear(x, self.fused).view(-1, self.s.layers, self.s.kv)
        for layer in range(self.s.layers):
            latent, key = y[:, layer].split((self.s.latent, self.s.rope), -1)
            self.finish(layer, latent, key, cos, sin, slots)

    def wake(self):
        F.linear(torch.ones(1, self.s.hidden, dtype=torch.bfloat16), self.other)


# ---- measuring -----------------------------------------------------------------------------------


def run_ours(ours, path, x, positions, slots):
    ours.run(path, x.shape[0], x.data_ptr(), positions.data_ptr(), slots.data_ptr())


def check(peer, ours, x, positions, slots):
    """Both sides must have made the same entries, up to the order of accumulation."""
    peer.run_full(x, positions, slots)
    run_ours(ours, "onepass", x, positions, slots)
    worst = 0.0
    for layer in range(peer.s.layers):
        a = peer.cache[layer][slots].float()
        raw = torch.frombuffer(ours.entries(layer, peer.s.kv), dtype=torch.bfloat16)
        b = raw.view(SLOTS, peer.s.kv)[slots].float()
        worst = max(worst, ((a - b).abs() / (a.abs() + 0.01 * a.abs().max())).max().item())
    if not worst < 0.25:
        sys.exit(f"PyTorch and libdspark disagree: relative difference {worst:.3g}")
    return worst


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("checkpoint", nargs="?", help="K3-shaped checkpoint (context-only is enough)")
    p.add_argument("--isa", choices=list(Dspark.ISAS), default="auto")
    add_arguments(p, "1,8,16,32,64,512", 512)
    a, sizes = parse(p)

    import_torch()
    torch.set_num_threads(a.threads)
    torch.set_grad_enabled(False)
    config = {}
    if a.checkpoint:
        with open(os.path.join(a.checkpoint, "config.json"), encoding="utf-8") as f:
            config = json.load(f)
    shapes = Shapes(config)
    peer = TorchContext(shapes, a.checkpoint)
    wake = dict.fromkeys(("torch full", "torch 5x576", "torch 2880"), peer.wake)
    contenders = {"torch full": peer.run_full, "torch 5x576": peer.run_narrow, "torch 2880": peer.run_fused}
    ours = None
    if a.checkpoint:
        ours = Dspark(a.library, a.checkpoint, a.threads, a.isa, max(512, max(sizes)))
        taps = torch.zeros(ours.tap_values, dtype=torch.bfloat16)
        state = torch.zeros(shapes.hidden, dtype=torch.bfloat16)
        for path in Dspark.PATHS:
            wake["dspark " + path] = (lambda q: lambda: ours.wake(q, taps.data_ptr(), state.data_ptr()))(path)
            contenders["dspark " + path] = (lambda q: lambda *rest: run_ours(ours, q, *rest))(path)

    print(f"torch {torch.__version__}, {a.threads} threads, "
          f"{'cold weights (%d MB streamed before each call)' % a.flush_mb if a.flush_mb else 'warm weights'}, "
          f"median of {a.reps}" + (f"; libdspark {ours.version}, {ours.isa}" if ours else ""))
    g = torch.Generator().manual_seed(2)
    table = Table(a.threads, {"torch full/onepass": lambda m: m["torch full"] / m["dspark onepass"],
                              "torch 2880/onepass": lambda m: m["torch 2880"] / m["dspark onepass"]})
    flush = Flush(a.flush_mb)
    for n in sizes:
        x = torch.randn(n, shapes.hidden, generator=g).bfloat16()
        positions = torch.arange(1000, 1000 + n, dtype=torch.int64)
        slots = torch.randperm(SLOTS, generator=g)[:n].contiguous()
        if ours and peer.real:
            worst = check(peer, ours, x, positions, slots)
            print(f"n = {n}: same entries on both sides (largest relative difference {worst:.2g})", file=sys.stderr)
        times = measure(contenders, (x, positions, slots), a.reps, flush, a.settle_ms / 1e3, wake)
        table.add(n, times)
    table.write(a.csv)


if __name__ == "__main__":
    main()
