"""What every peer script needs: libdspark through ctypes, contenders that take turns in one process, their table.

Rows are handed over as addresses, so that a script may keep them in PyTorch, NumPy or plain memory. Nothing here
knows a peer.
"""
import csv
import ctypes as C
import math
import os
import statistics
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBRARY = os.path.join(ROOT, "build", "release", "libdspark.so")
BLOCK = 64  # entries in a block of the paged caches
SLOTS = 4096


class Error(C.Structure):
    _fields_ = [("code", C.c_int), ("where", C.c_char * 256), ("message", C.c_char * 512)]


class ModelOpts(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("parts", C.c_uint32), ("n_threads", C.c_uint32),
                ("allocator", C.c_void_p), ("progress", C.c_void_p), ("progress_user", C.c_void_p),
                ("vllm_compat", C.c_int), ("target", C.c_char_p), ("embed_tokens", C.c_void_p),
                ("lm_head", C.c_void_p), ("prepacked", C.c_char_p), ("prepacked_verify", C.c_int)]


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


class ConfigHead(C.Structure):
    """The first fields of dspark_config."""
    _names = ("hidden", "intermediate", "layers", "heads", "q_rank", "latent", "nope", "rope", "v", "vocab", "taps",
              "tap_width")
    _fields_ = [(name, C.c_uint32) for name in _names]


class RunInfo(C.Structure):
    _fields_ = [("n_rows", C.c_size_t), ("n_written", C.c_size_t), ("n_skipped", C.c_size_t),
                ("max_position", C.c_int64)]


class Dspark:
    """A checkpoint's context KV on the paths asked for; bf16 cache of SLOTS entries a layer."""

    PATHS = {"onepass": 0, "per-layer": 1, "full": 2}
    ISAS = {"auto": 0, "ref": 1, "avx2": 2, "avx512": 3, "avx512bf16": 4}

    def __init__(self, library, checkpoint, threads, isa, max_tokens, paths=tuple(PATHS)):
        try:
            self.lib = C.CDLL(library)
        except OSError as e:
            sys.exit(f"libdspark cannot be loaded ({e}); build it, or name it with --library")
        for name in ("isa_name", "version"):
            getattr(self.lib, "dspark_" + name).restype = C.c_char_p
        self.lib.dspark_cache_get_view.restype = C.POINTER(View)
        self.lib.dspark_cache_get_view.argtypes = [C.c_void_p]
        self.lib.dspark_context_isa.argtypes = [C.c_void_p]
        self.lib.dspark_context_run.argtypes = [C.c_void_p] * 5
        self.lib.dspark_context_states.argtypes = [C.c_void_p] * 4
        self.err = Error()

        # The library's init functions write structs of its own size; these may be older and smaller, which their
        # struct_size tells. Zero is the default of every field.
        opts = ModelOpts(struct_size=C.sizeof(ModelOpts))
        opts.parts, opts.n_threads = 3, threads  # context and q_a
        self.model = C.c_void_p()
        self.call("dspark_model_open", C.byref(self.model), os.fsencode(checkpoint), C.byref(opts))
        self.lib.dspark_model_config.restype = C.POINTER(ConfigHead)
        self.lib.dspark_model_config.argtypes = [C.c_void_p]
        self.config = self.lib.dspark_model_config(self.model).contents
        self.tap_values = self.config.taps * self.config.tap_width

        self.cache = C.c_void_p()
        self.call("dspark_cache_create", C.byref(self.cache), self.model, 0, BLOCK, C.c_uint64(SLOTS // BLOCK), None)
        self.view = self.lib.dspark_cache_get_view(self.cache)

        self.contexts = {}
        for name in paths:
            o = ContextOpts(struct_size=C.sizeof(ContextOpts))
            o.isa, o.n_threads, o.path, o.max_tokens = self.ISAS[isa], threads, self.PATHS[name], max_tokens
            ctx = C.c_void_p()
            self.call("dspark_context_create", C.byref(ctx), self.model, C.byref(o))
            self.contexts[name] = ctx
        self.isa = self.lib.dspark_isa_name(self.lib.dspark_context_isa(self.contexts["onepass"])).decode()
        self.version = self.lib.dspark_version().decode()
        self.batch, self.info = Batch(struct_size=C.sizeof(Batch)), RunInfo()

    def check(self, name, status):
        if status != 0:
            sys.exit(f"{name}: {self.err.where.decode()}: {self.err.message.decode()}")

    def call(self, name, *args):
        self.check(name, getattr(self.lib, name)(*args, C.byref(self.err)))

    def run(self, path, n, states, positions, slots):
        """n rows; the rest are addresses of bf16 states [n, hidden], int64 positions and int64 slots."""
        b = self.batch
        b.n_tokens, b.states, b.positions, b.slots = n, states, positions, slots
        self.check("dspark_context_run",
                   self.lib.dspark_context_run(self.contexts[path], C.byref(b), self.view, C.byref(self.info),
                                               C.byref(self.err)))

    def wake(self, path, taps, out):
        """Makes the path's threads run without reading the weights of run(): taps -> states of one row."""
        b = Batch(struct_size=C.sizeof(Batch))
        b.n_tokens, b.taps = 1, taps
        self.check("dspark_context_states",
                   self.lib.dspark_context_states(self.contexts[path], C.byref(b), out, C.byref(self.err)))

    def entries(self, layer, width):
        """A copy of one layer's cache: SLOTS rows of `width` bf16 values, as bytes."""
        return bytearray(C.string_at(self.view.contents.layers[layer], SLOTS * width * 2))


def add_arguments(p, sizes, flush_mb):
    """What every script is called with (README.md), but the checkpoint."""
    p.add_argument("--library", default=LIBRARY, help="libdspark.so")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--n", default=sizes, help="positions of a call, separated by commas")
    p.add_argument("--reps", type=int, default=15)
    p.add_argument("--flush-mb", type=int, default=flush_mb,
                   help="bytes streamed before each timed call; 0 = warm weights")
    p.add_argument("--settle-ms", type=float, default=10.0)
    p.add_argument("--csv", help="write all figures to this file")


def parse(p):
    """The arguments, and --n as numbers."""
    a = p.parse_args()
    sizes = [int(n) for n in a.n.split(",")]
    if not all(0 < n <= SLOTS for n in sizes):
        p.error(f"--n: from 1 to {SLOTS}")
    return a, sizes


def skip(reason):
    """Ends a script that lacks something: bench/run prints the reason and goes on."""
    print(reason, file=sys.stderr)
    sys.exit(77)


def import_numpy():
    """Late, so that --help works without it and its absence is one line."""
    try:
        import numpy
        return numpy
    except ImportError as e:
        skip(f"NumPy cannot be imported ({e}); python3 -m pip install numpy")


def to_bf16(x):
    """A NumPy array rounded to bf16, to nearest even; as uint16."""
    np = import_numpy()
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Flush:
    """Empties the caches by reading a larger buffer. It only reads: lines that were written would have to go back to
    memory while the next contender runs."""

    def __init__(self, megabytes):
        self.buffer = bytearray(b"\1") * (megabytes << 20)

    def __call__(self):
        self.buffer.find(0)  # it is not there


def measure(contenders, args, reps, flush, settle, wake=None):
    """Seconds of every call, by name. flush() empties the caches; in settle seconds threads that still spin for the
    contender before fall asleep; wake[name]() then runs its own threads once on something else, untimed: in use
    they are awake, since other work came just before."""
    times = {name: [] for name in contenders}
    names = list(contenders)
    for run in contenders.values():  # code, thread pools and output pages; not the weights
        run(*args)
    for r in range(reps):
        for name in names[r % len(names):] + names[:r % len(names)]:
            flush()
            time.sleep(settle)
            if wake:
                wake[name]()
            t0 = time.perf_counter()
            contenders[name](*args)
            times[name].append(time.perf_counter() - t0)
    return times


class Table:
    """A line for each n, printed when it is measured: the contenders' medians, then ratios of them. Keeps the CSV's
    rows (README.md has the columns)."""

    def __init__(self, threads, ratios):
        """ratios: a title and a function of the medians by name; asked for where libdspark takes part."""
        self.threads, self.ratios, self.rows = threads, ratios, []

    def add(self, n, times):
        medians = {k: statistics.median(v) * 1e3 for k, v in times.items()}
        ours = medians.get("dspark onepass")
        ratios = self.ratios if ours else {}
        widths = {title: max(20, len(title) + 2) for title in ratios}
        if not self.rows:
            print(f"{'n':>5}" + "".join(f"{k + ' ms':>20}" for k in medians) +
                  "".join(f"{title:>{widths[title]}}" for title in ratios))
        print(f"{n:>5}" + "".join(f"{v:>20.3f}" for v in medians.values()) +
              "".join(f"{ratio(medians):>{widths[title] - 1}.2f}x" for title, ratio in ratios.items()), flush=True)
        self.rows += [{"n": n, "threads": self.threads, "contender": k, "median_ms": f"{medians[k]:.4f}",
                       "p99_ms": f"{sorted(v)[math.ceil(0.99 * len(v)) - 1] * 1e3:.4f}",
                       "min_ms": f"{min(v) * 1e3:.4f}", "max_ms": f"{max(v) * 1e3:.4f}", "reps": len(v),
                       "times_onepass": f"{medians[k] / ours:.3f}" if ours else ""} for k, v in times.items()]

    def write(self, path):
        """As CSV; path may be None."""
        if not path:
            return
        with open(path, "w", newline="", encoding="utf-8") as f:
            w = csv.DictWriter(f, fieldnames=list(self.rows[0]))
            w.writeheader()
            w.writerows(self.rows)
