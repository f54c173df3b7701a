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
import csv
import ctypes as C
import json
import math
import os
import statistics
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BLOCK = 64  # entries in a block of the paged caches
SLOTS = 4096


def import_torch():
    """Late, so that --help works without it and its absence is one line."""
    global torch, F
    try:
        import torch
        import torch.nn.functional as F
    except ImportError as e:
        sys.exit(f"pytorch_context.py: PyTorch cannot be imported ({e}); python3 -m pip install torch")


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


# ---- libdspark through ctypes --------------------------------------------------------------------


class Error(C.Structure):
    _fields_ = [("code", C.c_int), ("where", C.c_char * 256), ("message", C.c_char * 512)]


class ModelOpts(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("parts", C.c_uint32), ("n_threads", C.c_uint32),
                ("allocator", C.c_void_p), ("progress", C.c_void_p), ("progress_user", C.c_void_p)]


class ContextOpts(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("isa", C.c_int), ("n_threads", C.c_uint32),
                ("parallel", C.c_void_p), ("allocator", C.c_void_p), ("path", C.c_int),
                ("max_tokens", C.c_uint32), ("workspace_limit", C.c_uint64)]


class Batch(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("n_tokens", C.c_size_t), ("taps", C.c_void_p),
                ("taps_stride", C.c_size_t), ("states", C.c_void_p), ("states_stride", C.c_size_t),
                ("positions", C.c_void_p), ("slots", C.c_void_p), ("layer_slots", C.c_void_p)]


class View(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("n_layers", C.c_uint32), ("layers", C.POINTER(C.c_void_p)),
                ("n_blocks", C.c_uint64), ("block_size", C.c_uint32), ("block_stride", C.c_size_t),
                ("entry_stride", C.c_size_t), ("dtype", C.c_int), ("tile_scale", C.c_int),
                ("scales", C.c_void_p)]


class RunInfo(C.Structure):
    _fields_ = [("n_rows", C.c_size_t), ("n_written", C.c_size_t), ("n_skipped", C.c_size_t),
                ("max_position", C.c_int64)]


class Dspark:
    PATHS = {"onepass": 0, "per-layer": 1, "full": 2}
    ISAS = {"auto": 0, "ref": 1, "avx2": 2, "avx512": 3, "avx512bf16": 4}

    def __init__(self, library, checkpoint, threads, isa, max_tokens):
        self.lib = C.CDLL(library)
        for name in ("isa_name", "version"):
            getattr(self.lib, "dspark_" + name).restype = C.c_char_p
        self.lib.dspark_cache_get_view.restype = C.POINTER(View)
        self.lib.dspark_cache_get_view.argtypes = [C.c_void_p]
        self.lib.dspark_context_isa.argtypes = [C.c_void_p]
        self.lib.dspark_context_run.argtypes = [C.c_void_p] * 5
        self.err = Error()

        opts = ModelOpts()
        self.lib.dspark_model_opts_init(C.byref(opts))
        opts.parts, opts.n_threads = 3, threads  # context and q_a
        self.model = C.c_void_p()
        self.call("dspark_model_open", C.byref(self.model), os.fsencode(checkpoint), C.byref(opts))

        self.cache = C.c_void_p()
        self.call("dspark_cache_create", C.byref(self.cache), self.model, 0, BLOCK, C.c_uint64(SLOTS // BLOCK), None)
        self.view = self.lib.dspark_cache_get_view(self.cache)

        self.contexts = {}
        for name, path in self.PATHS.items():
            o = ContextOpts()
            self.lib.dspark_context_opts_init(C.byref(o))
            o.isa, o.n_threads, o.path, o.max_tokens = self.ISAS[isa], threads, path, max_tokens
            ctx = C.c_void_p()
            self.call("dspark_context_create", C.byref(ctx), self.model, C.byref(o))
            self.contexts[name] = ctx
        self.isa = self.lib.dspark_isa_name(self.lib.dspark_context_isa(self.contexts["onepass"])).decode()
        self.batch, self.info = Batch(), RunInfo()
        self.lib.dspark_batch_init(C.byref(self.batch))

    def call(self, name, *args):
        if getattr(self.lib, name)(*args, C.byref(self.err)) != 0:
            sys.exit(f"{name}: {self.err.where.decode()}: {self.err.message.decode()}")

    def run(self, path, x, positions, slots):
        b = self.batch
        b.n_tokens, b.states = x.shape[0], x.data_ptr()
        b.positions, b.slots = positions.data_ptr(), slots.data_ptr()
        status = self.lib.dspark_context_run(self.contexts[path], C.byref(b), self.view, C.byref(self.info),
                                             C.byref(self.err))
        if status != 0:
            sys.exit(f"dspark_context_run: {self.err.where.decode()}: {self.err.message.decode()}")

    def entries(self, layer, width):
        """A copy of one layer's cache as a bf16 tensor."""
        n = SLOTS * width * 2
        raw = bytearray(C.string_at(self.view.contents.layers[layer], n))
        return torch.frombuffer(raw, dtype=torch.bfloat16).view(SLOTS, width)


# ---- measuring -----------------------------------------------------------------------------------


class Flush:
    """Streams through a buffer larger than the last-level cache, on all threads."""

    def __init__(self, megabytes):
        self.buffer = torch.zeros(megabytes << 17, dtype=torch.float64) if megabytes else None

    def __call__(self):
        if self.buffer is not None:
            self.buffer.add_(1.0)


def check(peer, ours, x, positions, slots):
    """Both sides must have made the same entries, up to the order of accumulation."""
    peer.run_full(x, positions, slots)
    ours.run("onepass", x, positions, slots)
    worst = 0.0
    for layer in range(peer.s.layers):
        a = peer.cache[layer][slots].float()
        b = ours.entries(layer, peer.s.kv)[slots].float()
        worst = max(worst, ((a - b).abs() / (a.abs() + 0.01 * a.abs().max())).max().item())
    if not worst < 0.25:
        sys.exit(f"PyTorch and libdspark disagree: relative difference {worst:.3g}")
    return worst


def measure(contenders, x, positions, slots, reps, flush, settle):
    times = {name: [] for name in contenders}
    names = list(contenders)
    for run in contenders.values():  # code, thread pools and output pages; not the weights
        run(x, positions, slots)
    for r in range(reps):
        for name in names[r % len(names):] + names[:r % len(names)]:
            flush()
            time.sleep(settle)  # so that no pool's spinning threads disturb the next contender
            t0 = time.perf_counter()
            contenders[name](x, positions, slots)
            times[name].append(time.perf_counter() - t0)
    return times


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("checkpoint", nargs="?", help="K3-shaped checkpoint (context-only is enough)")
    p.add_argument("--library", default=os.path.join(ROOT, "build", "release", "libdspark.so"))
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--isa", choices=list(Dspark.ISAS), default="auto")
    p.add_argument("--n", default="1,8,16,32,64,512", help="positions of a call, separated by commas")
    p.add_argument("--reps", type=int, default=15)
    p.add_argument("--flush-mb", type=int, default=512, help="bytes streamed before each timed call; 0 = warm weights")
    p.add_argument("--settle-ms", type=float, default=10.0)
    p.add_argument("--csv", help="write all figures to this file")
    a = p.parse_args()

    import_torch()
    torch.set_num_threads(a.threads)
    torch.set_grad_enabled(False)
    config = {}
    if a.checkpoint:
        with open(os.path.join(a.checkpoint, "config.json"), encoding="utf-8") as f:
            config = json.load(f)
    shapes = Shapes(config)
    sizes = [int(n) for n in a.n.split(",")]
    if not all(0 < n <= SLOTS for n in sizes):
        p.error(f"--n: from 1 to {SLOTS}")
    peer = TorchContext(shapes, a.checkpoint)
    contenders = {"torch full": peer.run_full, "torch 5x576": peer.run_narrow, "torch 2880": peer.run_fused}
    ours = None
    if a.checkpoint:
        ours = Dspark(a.library, a.checkpoint, a.threads, a.isa, max(512, max(sizes)))
        for path in Dspark.PATHS:
            contenders["dspark " + path] = (lambda q: lambda *rest: ours.run(q, *rest))(path)

    print(f"torch {torch.__version__}, {a.threads} threads, "
          f"{'cold weights (%d MB streamed before each call)' % a.flush_mb if a.flush_mb else 'warm weights'}, "
          f"median of {a.reps}" + (f"; libdspark {ours.lib.dspark_version().decode()}, {ours.isa}" if ours else ""))
    g = torch.Generator().manual_seed(2)
    rows = []
    flush = Flush(a.flush_mb)
    for n in sizes:
        x = torch.randn(n, shapes.hidden, generator=g).bfloat16()
        positions = torch.arange(1000, 1000 + n, dtype=torch.int64)
        slots = torch.randperm(SLOTS, generator=g)[:n].contiguous()
        if ours and peer.real:
            worst = check(peer, ours, x, positions, slots)
            print(f"n = {n}: same entries on both sides (largest relative difference {worst:.2g})", file=sys.stderr)
        times = measure(contenders, x, positions, slots, a.reps, flush, a.settle_ms / 1e3)
        medians = {k: statistics.median(v) * 1e3 for k, v in times.items()}
        base = medians.get("dspark onepass")
        for k, v in times.items():
            v = sorted(v)
            rows.append({"n": n, "threads": a.threads, "contender": k, "median_ms": f"{medians[k]:.4f}",
                         "min_ms": f"{v[0] * 1e3:.4f}", "max_ms": f"{v[-1] * 1e3:.4f}", "reps": len(v),
                         "times_onepass": f"{medians[k] / base:.3f}" if base else ""})
        if n == sizes[0]:
            head = f"{'n':>5}" + "".join(f"{k + ' ms':>20}" for k in medians)
            print(head + (f"{'torch full/onepass':>20}{'torch 2880/onepass':>20}" if base else ""))
        line = f"{n:>5}" + "".join(f"{v:>20.3f}" for v in medians.values())
        if base:
            line += f"{medians['torch full'] / base:>19.2f}x{medians['torch 2880'] / base:>19.2f}x"
        print(line, flush=True)
    if a.csv:
        with open(a.csv, "w", newline="", encoding="utf-8") as f:
            w = csv.DictWriter(f, fieldnames=list(rows[0]))
            w.writeheader()
            w.writerows(rows)


if __name__ == "__main__":
    main()
