"""Rotary frequencies and tables of the drafter, with the precision of every step spelled out.

base^(2i/dim) in double, rounded to fp32; its reciprocal and everything of YaRN's mix in fp32; the
angle is the fp32 product of fp32(position) and the frequency; cos and sin of that angle in double,
rounded to fp32, times the fp32 attention factor.
"""
import math

import numpy as np

F = np.float32


class Rope:
    """The rotary part of a config.json."""

    def __init__(self, config):
        self.dim = config["qk_rope_head_dim"]
        p = config.get("rope_parameters") or config.get("rope_scaling") or {}
        self.kind = p.get("rope_type", p.get("type", "default"))
        self.theta = float(p.get("rope_theta", config.get("rope_theta")))
        if self.kind in ("yarn", "deepseek_yarn"):
            self.kind = "yarn"
            self.factor = float(p["factor"])
            self.original = int(p["original_max_position_embeddings"])
            self.beta_fast = float(p.get("beta_fast", 32))
            self.beta_slow = float(p.get("beta_slow", 1))
            self.mscale = float(p.get("mscale", 1))
            self.mscale_all_dim = float(p.get("mscale_all_dim", 0))
            self.extrapolation = float(p.get("extrapolation_factor", 1))
            self.attn = float(p.get("attn_factor", 1))
        elif self.kind != "default":
            raise ValueError("rope_type %r" % self.kind)

    def correction_range(self):
        def dim_of(rotations):
            return (self.dim * math.log(self.original / (rotations * 2 * math.pi))
                    / (2 * math.log(self.theta)))

        low = max(math.floor(dim_of(self.beta_fast)), 0)
        high = min(math.ceil(dim_of(self.beta_slow)), self.dim - 1)
        return low, high + 0.001 if low == high else high

    def frequencies(self):
        """[dim/2] float32."""
        i = np.arange(self.dim // 2)
        power = np.array([self.theta ** (2 * int(j) / self.dim) for j in i]).astype(F)
        plain = F(1) / power
        if self.kind == "default":
            return plain
        stretched = F(1) / (F(self.factor) * power)
        low, high = self.correction_range()
        ramp = np.clip((i.astype(F) - F(low)) / (F(high) - F(low)), F(0), F(1))
        keep = (F(1) - ramp) * F(self.extrapolation)
        return stretched * (F(1) - keep) + plain * keep

    def frequencies_f64(self):
        """The same in double throughout: what the spec's spot values are."""
        i = np.arange(self.dim // 2)
        plain = self.theta ** (-2.0 * i / self.dim)
        if self.kind == "default":
            return plain
        low, high = self.correction_range()
        keep = (1 - np.clip((i - low) / (high - low), 0, 1)) * self.extrapolation
        return plain / self.factor * (1 - keep) + plain * keep

    def attention_factor(self):
        if self.kind == "default":
            return 1.0

        def m(scale):
            return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

        return m(self.mscale) / m(self.mscale_all_dim) * self.attn

    def angles(self, positions):
        """[n, dim/2] float32."""
        return np.asarray(positions).astype(F)[:, None] * self.frequencies()[None, :]

    def table(self, positions):
        """cos and sin, [n, dim/2] float32 each."""
        a = self.angles(positions).astype(np.float64)
        attn = F(self.attention_factor())
        return np.cos(a).astype(F) * attn, np.sin(a).astype(F) * attn
