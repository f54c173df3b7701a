"""The weights that the golden files of quantised modules are made from, for each library that makes them."""
import torch

import generator
from twin import bf16_from_bits

SEED = 20260901
KV0, KV1, UP = ("layers.0.self_attn.kv_a_proj_with_mqa", "layers.1.self_attn.kv_a_proj_with_mqa",
                "layers.1.mlp.up_proj")
KV_ROWS = [0, 1, 47, 48, 127, 128, 383, 384, 511, 512, 513, 574, 575]  # of 576 rows


def special():
    """[12, 256]; the largest magnitude is 10.5, so that 2688 / 10.5 is a power of two."""
    g = torch.Generator().manual_seed(7)
    w = torch.randn(12, 256, generator=g) * 0.02
    w[0] = 0
    w[1, :128] = 0
    w[2] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 32)
    w[2, 1::2] *= -1
    w[3] *= 2.0**-120
    w[4] = torch.linspace(-10.5, 10.5, 256)
    w[5] = 2.0**-133 * (torch.arange(256) - 128)
    w[6] = torch.tensor([10.5, -10.5] * 128)
    w[7] = (torch.arange(256) - 128) / 16.0
    w[8, ::2] = -0.0
    w[8, 1::2] = -(2.0**-126)
    w[9] = torch.tensor([0.5, 1.5, -2.5, -3.5, 7.5, -7.5, 7, -8] * 32)
    w[10, 17] = 9.0
    w[11] = (2.0 ** (-(torch.arange(256) % 40).float())) * 1.75
    return w.bfloat16()


def weight(module, shape):
    return bf16_from_bits(generator.tensor(module + ".weight", shape, SEED))
