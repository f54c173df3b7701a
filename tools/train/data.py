"""The text: bytes, split, windows, prompts.

The text is tinyshakespeare, about 1.1 MB of the plays of William Shakespeare, which are in the
public domain. It is not part of this project; README.md says where it comes from. The first 95 %
are for training, the rest is held out.
"""
import hashlib

import numpy as np
import torch

HELD_OUT = 0.05
MASK_TOKEN = 255  # never a byte of ASCII text, so it is free for the masks of a block


def load(path):
    """(training bytes, held-out bytes, digest of the whole text)."""
    raw = open(path, "rb").read()
    if len(raw) < 100000:
        raise SystemExit("%s: %d bytes are too few to train on" % (path, len(raw)))
    if MASK_TOKEN in raw:
        raise SystemExit("%s: byte 255 occurs, which must stay free" % path)
    text = np.frombuffer(raw, dtype=np.uint8)
    cut = int(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:], hashlib.sha256(raw).hexdigest()


def generator(seed, *key):
    """A torch generator that depends on the seed and the key alone, so that a resumed run draws
    what an uninterrupted one would have drawn."""
    mixed = hashlib.sha256(repr((seed,) + key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed[:7], "little"))


def windows(text, starts, length):
    """[len(starts), length] int64."""
    index = np.asarray(starts)[:, None] + np.arange(length)[None, :]
    return torch.from_numpy(text[index].astype(np.int64))


def random_windows(text, count, length, gen):
    starts = torch.randint(0, len(text) - length + 1, (count,), generator=gen).numpy()
    return windows(text, starts, length)


def held_out_prompts(held_out, count=200, length=64):
    """Evenly spread prompts of the held-out text, the first byte of each at a word's beginning."""
    prompts = []
    for i in range(count):
        at = i * (len(held_out) - 2 * length) // count
        while at > 0 and held_out[at - 1] not in b" \n":
            at += 1
        prompts.append(held_out[at:at + length].tobytes())
    return prompts


def escape(prompt):
    return prompt.decode("ascii").replace("\\", "\\\\").replace("\n", "\\n")
