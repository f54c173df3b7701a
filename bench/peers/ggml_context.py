#!/usr/bin/env python3
"""ggml's matrix product, side by side with libdspark in one process.

ggml does the product alone: [n, 7168] fp32 x weights [2880, 7168] of --type, result fp32, as its graphs run it (rows
are converted inside the call; 4-bit types round them to 8 bits). libdspark does its one pass over the checkpoint,
which should be in the same format: norm, RoPE and cache write included, rows kept in bf16. Contenders take turns
round by round, with cold weights. ggml's result is checked against NumPy.

Not part of any build or test. Needs NumPy and a shared libggml (no package has one: build ggml or llama.cpp with
BUILD_SHARED_LIBS and name libggml.so, or let GGML_LIBRARY name it).

    build/release/dspark synth build/k3 --preset kimi-k3 --context-only
    python3 bench/peers/ggml_context.py build/k3 --ggml path/to/libggml.so
    build/release/dspark quantize build/k3 build/k3-mxfp4 --format mxfp4
    python3 bench/peers/ggml_context.py build/k3-mxfp4 --type mxfp4 --ggml path/to/libggml.so
"""
import argparse
import ctypes as C
import os
import sys

from side_by_side import (SLOTS, Dspark, Flush, Table, add_arguments, import_numpy, measure, parse, skip,
                          to_bf16)

TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30, "mxfp4": 39, "nvfp4": 40}  # enum ggml_type
F32 = 0
TOLERANCE = {"f16": 0.02, "bf16": 0.05, "q8_0": 0.1}  # of values of size 1; the others have 4 bits
MEMORY = 1 << 20  # tensors' and graphs' headers


class InitParams(C.Structure):
    _fields_ = [("mem_size", C.c_size_t), ("mem_buffer", C.c_void_p), ("no_alloc", C.c_bool)]


class Ggml:
    """Products of one matrix with different numbers of rows."""

    def __init__(self, library, threads):
        folder = os.path.dirname(os.path.abspath(library))
        try:
            self.base = C.CDLL(os.path.join(folder, "libggml-base.so"), C.RTLD_GLOBAL)
            self.cpu = C.CDLL(os.path.join(folder, "libggml-cpu.so"), C.RTLD_GLOBAL)
        except OSError as e:
            sys.exit(f"ggml_context.py: {e} (libggml-base.so and libggml-cpu.so lie beside libggml.so)")
        self.threads = threads
        for lib, name, result, args in (
                (self.base, "ggml_init", C.c_void_p, [InitParams]),
                (self.base, "ggml_new_tensor_2d", C.c_void_p, [C.c_void_p, C.c_int, C.c_int64, C.c_int64]),
                (self.base, "ggml_mul_mat", C.c_void_p, [C.c_void_p] * 3),
                (self.base, "ggml_new_graph", C.c_void_p, [C.c_void_p]),
                (self.base, "ggml_build_forward_expand", None, [C.c_void_p] * 2),
                (self.base, "ggml_get_data", C.c_void_p, [C.c_void_p]),
                (self.base, "ggml_nbytes", C.c_size_t, [C.c_void_p]),
                (self.base, "ggml_version", C.c_char_p, []),
                (self.base, "ggml_quantize_chunk", C.c_size_t,
                 [C.c_int, C.c_void_p, C.c_void_p, C.c_int64, C.c_int64, C.c_int64, C.c_void_p]),
                (self.cpu, "ggml_cpu_init", None, []),
                (self.cpu, "ggml_graph_compute_with_ctx", C.c_int, [C.c_void_p, C.c_void_p, C.c_int])):
            f = getattr(lib, name)
            f.restype, f.argtypes = result, args
        self.cpu.ggml_cpu_init()
        self.version = self.base.ggml_version().decode()

    def matrix(self, values, kind):
        """fp32 [rows, columns] as a tensor of `kind`."""
        rows, columns = values.shape
        context = self.context(rows * columns * 4)
        tensor = self.base.ggml_new_tensor_2d(context, kind, columns, rows)
        n = self.base.ggml_quantize_chunk(kind, values.ctypes.data, self.base.ggml_get_data(tensor), 0, rows, columns,
                                          None)
        if n != self.base.ggml_nbytes(tensor):
            sys.exit("ggml_context.py: ggml did not convert the weights")
        return tensor, n

    def context(self, n_bytes):
        context = self.base.ggml_init(InitParams(n_bytes + MEMORY, None, False))
        if not context:
            sys.exit("ggml_context.py: ggml has no memory")
        return context

    def product(self, matrix, x, n_out):
        """The graph of x times the matrix, and the array that holds the result after it ran."""
        n, k = x.shape
        context = self.context(x.nbytes + n * n_out * 4)
        xt = self.base.ggml_new_tensor_2d(context, F32, k, n)
        C.memmove(self.base.ggml_get_data(xt), x.ctypes.data, x.nbytes)
        y = self.base.ggml_mul_mat(context, matrix, xt)
        graph = self.base.ggml_new_graph(context)
        self.base.ggml_build_forward_expand(graph, y)
        out = np.ctypeslib.as_array(C.cast(self.base.ggml_get_data(y), C.POINTER(C.c_float)), (n, n_out))
        return graph, out


class Runner:
    """Runs graphs. ggml takes a call's scratch (converted rows) from a context, which is emptied before each."""

    def __init__(self, ggml, scratch):
        self.ggml = ggml
        self.ggml.base.ggml_reset.argtypes = [C.c_void_p]
        self.context = ggml.context(scratch)

    def __call__(self, graph):
        self.ggml.base.ggml_reset(self.context)
        if self.ggml.cpu.ggml_graph_compute_with_ctx(self.context, graph, self.ggml.threads) != 0:
            sys.exit("ggml_context.py: ggml could not compute the graph")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("checkpoint", help="K3-shaped checkpoint in the format of --type (context-only is enough)")
    p.add_argument("--ggml", default=os.environ.get("GGML_LIBRARY"), help="libggml.so (default: GGML_LIBRARY)")
    p.add_argument("--type", choices=list(TYPES), default="bf16")
    add_arguments(p, "1,2,4,8,16,32,64", 256)
    a, sizes = parse(p)

    if not a.ggml:
        skip("ggml_context.py: no libggml.so: name it with --ggml or in GGML_LIBRARY")
    global np
    np = import_numpy()
    ggml = Ggml(a.ggml, a.threads)
    ours = Dspark(a.library, a.checkpoint, a.threads, "auto", max(512, max(sizes)), ("onepass",))
    hidden, n_out = ours.config.hidden, ours.config.layers * (ours.config.latent + ours.config.rope)
    rng = np.random.default_rng(3)
    values = rng.standard_normal((n_out, hidden), dtype=np.float32) * np.float32(hidden**-0.5)
    matrix, n_bytes = ggml.matrix(values, TYPES[a.type])
    other, _ = ggml.matrix(values, TYPES[a.type])
    run = Runner(ggml, (max(sizes) + 1) * hidden * 4 + (16 << 20))
    print(f"[n, {hidden}] x [{hidden}, {n_out}] of {a.type} ({n_bytes / 1e6:.1f} MB) by ggml {ggml.version}; "
          f"libdspark {ours.version}, {ours.isa}, its one pass; {a.threads} threads, cold weights, medians of {a.reps}")

    flush = Flush(a.flush_mb)
    table = Table(a.threads, {"ggml / onepass": lambda m: m["ggml"] / m["dspark onepass"]})
    taps, state = np.zeros(ours.tap_values, np.uint16), np.zeros(hidden, np.uint16)
    awake, _ = ggml.product(other, np.ones((1, hidden), np.float32), n_out)
    wake = {"ggml": lambda: run(awake),
            "dspark onepass": lambda: ours.wake("onepass", taps.ctypes.data, state.ctypes.data)}
    for n in sizes:
        x = rng.standard_normal((n, hidden), dtype=np.float32)
        positions = np.arange(1000, 1000 + n, dtype=np.int64)
        slots = rng.permutation(SLOTS)[:n].astype(np.int64)
        graph, out = ggml.product(matrix, x, n_out)
        run(graph)
        worst = float(np.abs(out[0] - x[0] @ values.T).max())
        if not worst < TOLERANCE.get(a.type, 0.8):
            sys.exit(f"ggml_context.py: ggml and NumPy disagree by {worst:.3g}")
        states = to_bf16(x)
        contenders = {"ggml": lambda: run(graph),
                      "dspark onepass": lambda: ours.run("onepass", n, states.ctypes.data, positions.ctypes.data,
                                                         slots.ctypes.data)}
        times = measure(contenders, (), a.reps, flush, a.settle_ms / 1e3, wake)
        table.add(n, times)
    table.write(a.csv)


if __name__ == "__main__":
    main()
