#!/usr/bin/env python3
"""Checks of the twin itself against numbers that were worked out elsewhere: run it directly."""
import numpy as np

import generator
from rope import Rope

K3 = {"qk_rope_head_dim": 64, "rope_theta": 50000.0,
      "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "rope_theta": 50000.0,
                          "original_max_position_embeddings": 32768, "beta_fast": 32,
                          "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}}


def test_yarn_spot_values():
    rope = Rope(K3)
    assert rope.correction_range() == (15, 26)
    assert rope.attention_factor() == 1.0
    spots = {0: 1.0, 15: 0.0062713034, 16: 0.0040782831, 17: 0.0026274080, 25: 2.5446984e-5,
             26: 4.7526617e-6, 31: 8.764413e-7}
    exact, used = rope.frequencies_f64(), rope.frequencies()
    for i, want in spots.items():
        assert abs(exact[i] / want - 1) < 6e-8, (i, exact[i], want)
        assert abs(used[i] / want - 1) < 4e-7, (i, used[i], want)


def test_plain_frequencies():
    rope = Rope({"qk_rope_head_dim": 64, "rope_theta": 50000.0})
    want = 50000.0 ** (-np.arange(32) / 32.0)
    assert np.all(np.abs(rope.frequencies() / want - 1) < 2e-7)


def test_angle_is_an_fp32_product():
    a = Rope(K3).angles([1048575])[0]
    assert a.dtype == np.float32 and a[0] == np.float32(1048575)


def test_generator_is_the_documented_one():
    # splitmix64's published first output for the state 0: mix(0 + G)
    assert generator.mix_int(generator.GOLDEN) == 0xE220A8397B1DCDAF
    # FNV-1a's published values
    assert generator.fnv1a("") == 0xCBF29CE484222325
    assert generator.fnv1a("foobar") == 0x85944171F73967E8
    whole = generator.values("context_proj.weight", 35840, 7, 0, 4099)
    for first, n in ((0, 1), (1, 7), (4090, 9), (1023, 1026)):
        part = generator.values("context_proj.weight", 35840, 7, first, n)
        assert np.array_equal(part, whole[first : first + n])


def test_generator_spread():
    x = (generator.values("w", 4096, 1, 0, 1 << 20).astype(np.uint32) << 16).view(np.float32)
    assert abs(x.std() * 64 - 1.75 / 3**0.5) < 0.01 and abs(x.mean()) < 1e-4


if __name__ == "__main__":
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            test()
            print("ok", name)
