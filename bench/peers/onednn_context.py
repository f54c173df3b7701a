#!/usr/bin/env python3
"""oneDNN's bf16 matmul over packed weights, side by side with libdspark in one process.

oneDNN does the product alone: [n, 7168] x [7168, 2880], weights reordered once into the layout that it chooses for
that n. libdspark does its one pass, from states to cache: the same product with norm, RoPE and cache write after it.
Contenders take turns round by round, with cold weights. The result of oneDNN is checked against NumPy.

Not part of any build or test. Needs NumPy and oneDNN 3 with an OpenMP runtime: `pip install onednn-cpu-gomp numpy`
(PyPI's `onednn` of later years is a SYCL build that needs its own runtime). PyTorch carries a newer oneDNN; when it
can be imported, its packed linear is timed as well.

    build/release/dspark synth build/k3 --preset kimi-k3 --context-only
    python3 bench/peers/onednn_context.py build/k3 --csv onednn.csv
"""
import argparse
import ctypes as C
import glob
import os
import sys

from side_by_side import (SLOTS, Dspark, Flush, Table, add_arguments, import_numpy, measure, parse, skip,
                          to_bf16)

BF16, QUERY_WEIGHTS_MD = 2, 131  # of dnnl_types.h
ARG_SRC, ARG_DST, ARG_WEIGHTS = 1, 17, 33


def import_torch():
    try:
        import torch
        torch.set_grad_enabled(False)
        return torch
    except ImportError:
        return None


def from_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def random_weights(rng, rows, columns):
    return to_bf16(rng.standard_normal((rows, columns), dtype=np.float32) * columns**-0.5)


def aligned(n_bytes, alignment=2 << 20):
    """Bytes on a huge page's boundary, which is what libdspark's weights have too."""
    raw = np.empty(n_bytes + alignment, dtype=np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start:start + n_bytes]


class Arg(C.Structure):
    _fields_ = [("arg", C.c_int), ("memory", C.c_void_p)]


class OneDnn:
    """One engine; a matmul for each number of rows, whose weights are in the layout it asked for."""

    def __init__(self, library):
        self.lib = C.CDLL(library)
        self.lib.dnnl_version.restype = C.POINTER(C.c_int)
        self.version = ".".join(str(self.lib.dnnl_version()[i]) for i in range(3))
        if not self.version.startswith("3."):
            sys.exit(f"onednn_context.py: {library} is oneDNN {self.version}; 3.x is wanted")
        self.lib.dnnl_memory_desc_get_size.restype = C.c_size_t
        self.lib.dnnl_memory_desc_get_size.argtypes = [C.c_void_p]
        self.lib.dnnl_primitive_desc_query_md.restype = C.c_void_p
        self.engine, self.stream = C.c_void_p(), C.c_void_p()
        self.call("dnnl_engine_create", C.byref(self.engine), 1, C.c_size_t(0))
        self.call("dnnl_stream_create", C.byref(self.stream), self.engine, 1)
        self.kept = []

    def call(self, name, *args):
        status = getattr(self.lib, name)(*args)
        if status != 0:
            sys.exit(f"onednn_context.py: {name} returned {status}")

    def describe(self, rows, columns, strides):
        md = C.c_void_p()
        dims = (C.c_int64 * 2)(rows, columns)
        if strides:
            self.call("dnnl_memory_desc_create_with_strides", C.byref(md), 2, dims, BF16, (C.c_int64 * 2)(*strides))
        else:  # format_tag_any
            self.call("dnnl_memory_desc_create_with_tag", C.byref(md), 2, dims, BF16, 1)
        return md

    def memory(self, md, array):
        m = C.c_void_p()
        self.call("dnnl_memory_create", C.byref(m), md, self.engine, C.c_void_p(array.ctypes.data))
        self.kept.append(array)
        return m

    def execute(self, primitive, args):
        self.call("dnnl_primitive_execute", primitive, self.stream, len(args), args)
        self.call("dnnl_stream_wait", self.stream)

    def matmul(self, x, weights, out):
        """A call that computes out[n, N] = x[n, K] * weights[N, K]^T, all bf16."""
        n, k = x.shape
        n_out = weights.shape[0]
        src, dst = self.describe(n, k, (k, 1)), self.describe(n, n_out, (n_out, 1))
        plain, wanted = self.describe(k, n_out, (1, k)), self.describe(k, n_out, None)
        pd, primitive = C.c_void_p(), C.c_void_p()
        self.call("dnnl_matmul_primitive_desc_create", C.byref(pd), self.engine, src, wanted, None, dst, None)
        self.call("dnnl_primitive_create", C.byref(primitive), pd)
        md = C.c_void_p(self.lib.dnnl_primitive_desc_query_md(pd, QUERY_WEIGHTS_MD, 0))
        packed = self.memory(md, aligned(self.lib.dnnl_memory_desc_get_size(md)))
        reorder_pd, reorder = C.c_void_p(), C.c_void_p()
        self.call("dnnl_reorder_primitive_desc_create", C.byref(reorder_pd), plain, self.engine, md, self.engine,
                  None)
        self.call("dnnl_primitive_create", C.byref(reorder), reorder_pd)
        self.execute(reorder, (Arg * 2)(Arg(ARG_SRC, self.memory(plain, weights).value), Arg(ARG_DST, packed.value)))
        args = (Arg * 3)(Arg(ARG_SRC, self.memory(src, x).value), Arg(ARG_WEIGHTS, packed.value),
                         Arg(ARG_DST, self.memory(dst, out).value))
        return lambda *_: self.execute(primitive, args)


def find_onednn(given):
    """The library of the PyPI package lies in the prefix of the Python that installed it."""
    if given:
        return given
    for prefix in (sys.prefix, os.path.expanduser("~/.local")):
        found = sorted(glob.glob(os.path.join(prefix, "lib*", "libdnnl.so.3*")))
        if found:
            return found[0]
    return None


def packed_linear(torch, x, weights):
    """PyTorch's linear over weights that its own oneDNN has reordered for this many rows."""
    w = torch.from_numpy(weights.view(np.int16)).view(torch.bfloat16)
    xt = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(w, x.shape[0])
    return lambda *_: torch.ops.mkldnn._linear_pointwise(xt, packed, None, "none", [], "")


def contenders_of(dnn, torch, ours, x, weights, positions, slots):
    """The calls that take turns for one number of rows. oneDNN's is run once and checked."""
    n, contenders = x.shape[0], {}
    if dnn:
        out = np.zeros((n, weights.shape[0]), np.uint16)
        contenders["oneDNN packed"] = dnn.matmul(x, weights, out)
        contenders["oneDNN packed"]()
        worst = float(np.abs(from_bf16(out[:1]) - from_bf16(x[:1]) @ from_bf16(weights).T).max())
        if not worst < 0.05:
            sys.exit(f"onednn_context.py: oneDNN and NumPy disagree by {worst:.3g}")
    if torch:
        contenders["torch packed"] = packed_linear(torch, x, weights)
    contenders["dspark onepass"] = lambda: ours.run("onepass", n, x.ctypes.data, positions.ctypes.data,
                                                    slots.ctypes.data)
    return contenders


def wakers(dnn, torch, ours, rng, n_out):
    """What runs each contender's threads on weights that are not timed."""
    hidden = ours.config.hidden
    other, one = random_weights(rng, n_out, hidden), to_bf16(np.ones((1, hidden)))
    taps, state = np.zeros(ours.tap_values, np.uint16), np.zeros(hidden, np.uint16)
    wake = {"dspark onepass": lambda: ours.wake("onepass", taps.ctypes.data, state.ctypes.data)}
    if dnn:
        wake["oneDNN packed"] = dnn.matmul(one, other, np.zeros((1, n_out), np.uint16))
    if torch:
        wake["torch packed"] = packed_linear(torch, one, other)
    return wake


def best_over_onepass(medians):
    return min(v for k, v in medians.items() if k != "dspark onepass") / medians["dspark onepass"]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("checkpoint", help="K3-shaped checkpoint (context-only is enough)")
    p.add_argument("--onednn", help="libdnnl.so.3 (default: that of this Python's prefix)")
    add_arguments(p, "1,2,4,8,16,32,64,128,512", 256)
    a, sizes = parse(p)

    global np
    np = import_numpy()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)  # before oneDNN's pool exists
    path, torch = find_onednn(a.onednn), import_torch()
    if not path and not torch:
        skip("onednn_context.py: no libdnnl.so.3 and no PyTorch; python3 -m pip install onednn-cpu-gomp numpy")
    dnn = OneDnn(path) if path else None
    if torch:
        torch.set_num_threads(a.threads)
    ours = Dspark(a.library, a.checkpoint, a.threads, "auto", max(512, max(sizes)), ("onepass",))
    hidden, n_out = ours.config.hidden, ours.config.layers * (ours.config.latent + ours.config.rope)
    names = (["oneDNN " + dnn.version] if dnn else []) + ([f"torch {torch.__version__}"] if torch else [])
    print(f"packed [n, {hidden}] x [{hidden}, {n_out}] by {', '.join(names)}; libdspark {ours.version}, {ours.isa}, "
          f"its one pass; {a.threads} threads, cold weights, medians of {a.reps}")

    rng = np.random.default_rng(3)
    weights, flush = random_weights(rng, n_out, hidden), Flush(a.flush_mb)
    table = Table(a.threads, {"best GEMM / onepass": best_over_onepass})
    wake = wakers(dnn, torch, ours, rng, n_out)
    for n in sizes:
        x = to_bf16(rng.standard_normal((n, hidden), dtype=np.float32))
        positions = np.arange(1000, 1000 + n, dtype=np.int64)
        slots = rng.permutation(SLOTS)[:n].astype(np.int64)
        contenders = contenders_of(dnn, torch, ours, x, weights, positions, slots)
        times = measure(contenders, (), a.reps, flush, a.settle_ms / 1e3, wake)
        table.add(n, times)
    table.write(a.csv)


if __name__ == "__main__":
    main()
