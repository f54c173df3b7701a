"""The synthetic value generator, second implementation (the first is src/ckpt/synth_values.c).

Value i of a tensor depends on (seed, name, i) only; docs/formats.md and src/ckpt/synth_values.h
state the rules. NumPy only.
"""
import numpy as np

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
CHUNK = 1 << 22


def mix_int(z):
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & MASK
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def fnv1a(name):
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 & MASK
    return h


def stream_key(name, seed):
    return mix_int(fnv1a(name) ^ mix_int((seed + GOLDEN) & MASK))


def words(key, first, n):
    """Words first .. first + n - 1 as uint64."""
    with np.errstate(over="ignore"):
        b = np.arange(first + 1, first + 1 + n, dtype=np.uint64)
        z = np.uint64(key) + b * np.uint64(GOLDEN)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z


def scale_offset(name, last_axis):
    """Scale and offset of a tensor, as exact Python floats."""
    if name.endswith("norm.weight") or name.startswith("fc_norm."):
        return 2.0**-18, 1.0
    if name.endswith("bias"):
        return 2.0**-16, 0.0
    if name in ("embed_tokens.weight", "markov_head.markov_w1.weight", "hidden_states"):
        last_axis = 1
    k = last_axis.bit_length() - 1
    if k % 2 == 0:
        return 1.75 * 2.0 ** (-15 - k // 2), 0.0
    return 1.25 * 2.0 ** (-15 - (k - 1) // 2), 0.0


def round_bf16(x):
    """float32 array to bf16 bits, nearest even; x is finite."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16)


def values(name, last_axis, seed, first, n):
    """bf16 bits (uint16) of values first .. first + n - 1."""
    scale, offset = scale_offset(name, last_axis)
    key = stream_key(name, seed)
    out = np.empty(n, dtype=np.uint16)
    for at in range(0, n, CHUNK):
        m = min(CHUNK, n - at)
        lo, hi = first + at, first + at + m
        w = words(key, lo // 4, (hi - 1) // 4 - lo // 4 + 1)
        lanes = w.astype("<u8").view("<i2")[lo % 4 : lo % 4 + m]
        x = lanes.astype(np.float32) * np.float32(scale)
        if offset:
            x = x + np.float32(offset)
        out[at : at + m] = round_bf16(x)
    return out


def tensor(name, shape, seed):
    """A whole tensor as bf16 bits."""
    n = 1
    for d in shape:
        n *= d
    return values(name, shape[-1], seed, 0, n).reshape(shape)


def token_ids(seed, n, vocab):
    w = words(stream_key("token_ids", seed), 0, n)
    return ((w >> np.uint64(32)) * np.uint64(vocab) >> np.uint64(32)).astype(np.int64)
