"""The drafter: the K3 DSpark structure at small size, for training and measuring.

Many blocks are computed at once. A block is an anchor at position s of a window: it sees the
context of the positions below s and its own N rows, all of them (not causal). MLA is written out
with keys and values per head; the absorbed form that is served is the same mathematics.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from data import MASK_TOKEN
from target import CONFIG as TARGET
from target import Mlp, Norm

CONFIG = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "hidden_act": "silu",
    "vocab_size": 256,
    "draft_vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "target_layer_ids": [1, 3, 4, 5],
    "num_target_layers": 4,
    "target_hidden_size": TARGET["hidden_size"],
    "target_num_hidden_layers": TARGET["num_hidden_layers"],
    "aux_hidden_stream": "prefix",
    "fc_norm": False,
    "mask_token_id": MASK_TOKEN,
    "block_size": 7,
    "is_causal": False,
    "sample_from_anchor": True,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "markov_rank": 32,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "torch_dtype": "bfloat16",
}


def yarn(config):
    """Frequencies [R/2] and the factor of the softmax scale."""
    p, dim = config["rope_parameters"], config["qk_rope_head_dim"]
    base, factor = p["rope_theta"], p["factor"]

    def turns(n):
        length = p["original_max_position_embeddings"]
        return dim * math.log(length / (n * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turns(p["beta_fast"])), 0)
    high = min(math.ceil(turns(p["beta_slow"])), dim - 1)
    ramp = [min(max((i - low) / (high - low + (0.001 if low == high else 0)), 0.0), 1.0)
            for i in range(dim // 2)]
    f = [base ** (-2.0 * i / dim) * (r / factor + 1 - r) for i, r in enumerate(ramp)]
    m = 0.1 * p["mscale_all_dim"] * math.log(factor) + 1.0
    return torch.tensor(f, dtype=torch.float32), m * m


def rotate(x, cos, sin):
    """Interleaved pairs (2j, 2j + 1)."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, eps = c["hidden_size"], c["rms_norm_eps"]
        self.heads, self.nope = c["num_attention_heads"], c["qk_nope_head_dim"]
        self.rope, self.value = c["qk_rope_head_dim"], c["v_head_dim"]
        self.rank = c["kv_lora_rank"]
        self.q_a_proj = nn.Linear(h, c["q_lora_rank"], bias=False)
        self.q_a_layernorm = Norm(c["q_lora_rank"], eps)
        self.q_b_proj = nn.Linear(c["q_lora_rank"], self.heads * (self.nope + self.rope),
                                  bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(h, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = Norm(self.rank, eps)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, h, bias=False)
        self.scale = (self.nope + self.rope) ** -0.5 * yarn(c)[1]

    def keys(self, x, table, r):
        """Keys and values [..., heads, width] of rows x [..., h]."""
        latent, pe = r(self.kv_a_proj_with_mqa(x)).split([self.rank, self.rope], dim=-1)
        kv = r(self.kv_b_proj(r(self.kv_a_layernorm(latent))))
        kv = kv.unflatten(-1, (self.heads, self.nope + self.value))
        nope, v = kv.split([self.nope, self.value], dim=-1)
        pe = r(rotate(pe, *table)).to(nope.dtype)
        pe = pe.unsqueeze(-2).expand(*nope.shape[:-1], self.rope)
        return torch.cat([nope, pe], dim=-1), v

    def forward(self, x, context, seen, tables, r):
        """x [b, a, n, h]: n rows of a blocks; context [b, s, h]; seen [b, a, s]: 0 or -inf."""
        b, a, n, _ = x.shape
        q = r(self.q_b_proj(r(self.q_a_layernorm(r(self.q_a_proj(x))))))
        nope, pe = q.unflatten(-1, (self.heads, self.nope + self.rope)).split(
            [self.nope, self.rope], dim=-1)
        cos, sin = tables[1]
        pe = r(rotate(pe, cos.unsqueeze(-2), sin.unsqueeze(-2))).to(nope.dtype)
        q = torch.cat([nope, pe], dim=-1) * self.scale           # [b, a, n, H, D]
        k0, v0 = self.keys(context, tables[0], r)                # [b, s, H, D]
        k1, v1 = self.keys(x, tables[1], r)                      # [b, a, n, H, D]
        q = q.permute(0, 3, 1, 2, 4)                             # [b, H, a, n, D]
        k1, v1 = k1.permute(0, 3, 1, 2, 4), v1.permute(0, 3, 1, 2, 4)
        s0 = q.flatten(2, 3) @ k0.permute(0, 2, 3, 1)            # [b, H, a*n, s]
        s0 = s0.unflatten(2, (a, n)) + seen[:, None, :, None].to(s0.dtype)
        s1 = q @ k1.transpose(-1, -2)                            # [b, H, a, n, n]
        p = torch.cat([s0, s1], dim=-1).softmax(-1)
        p0, p1 = p.split([s0.shape[-1], n], dim=-1)
        y = (p0.flatten(2, 3) @ v0.permute(0, 2, 1, 3)).unflatten(2, (a, n)) + p1 @ v1
        return r(self.o_proj(r(y.permute(0, 2, 3, 1, 4).flatten(-2))))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, eps = c["hidden_size"], c["rms_norm_eps"]
        self.input_layernorm = Norm(h, eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(h, eps)
        self.mlp = Mlp(h, c["intermediate_size"])

    def forward(self, x, context, seen, tables, r):
        a = r(self.input_layernorm(x))
        x = r(x + self.self_attn(a, context, seen, tables, r))
        a, m = r(self.post_attention_layernorm(x)), self.mlp
        act = r(r(F.silu(r(m.gate_proj(a)))) * r(m.up_proj(a)))
        return r(x + r(m.down_proj(act)))


class Markov(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.markov_w1 = nn.Embedding(c["vocab_size"], c["markov_rank"])
        self.markov_w2 = nn.Linear(c["markov_rank"], c["vocab_size"], bias=False)


class Confidence(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.proj = nn.Linear(c["hidden_size"] + c["markov_rank"], 1)


class Drafter(nn.Module):
    def __init__(self, config=CONFIG):
        super().__init__()
        h, eps = config["hidden_size"], config["rms_norm_eps"]
        self.config, self.rows = dict(config), config["block_size"]
        self.context_proj = nn.Linear(len(config["target_layer_ids"]) * h, h, bias=False)
        self.context_norm = Norm(h, eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.final_norm = Norm(h, eps)
        self.markov_head = Markov(config)
        self.confidence_head = Confidence(config)
        self.frequencies = yarn(config)[0]
        self.served = False

    def reset(self, gen):
        depth = (2 * self.config["num_hidden_layers"]) ** -0.5
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    last = name.endswith(("o_proj.weight", "down_proj.weight"))
                    std = p.shape[1] ** -0.5 * (0.5 * depth if last else 0.5)
                    if name.startswith(("markov", "confidence")):
                        std = 0.05
                    nn.init.normal_(p, 0.0, std, generator=gen)
            self.confidence_head.proj.bias.zero_()

    def r(self, x):
        """Rounds where serving rounds, when that is to be measured."""
        return x.bfloat16().float() if self.served else x

    def table(self, positions):
        angle = positions.float()[..., None] * self.frequencies
        return angle.cos(), angle.sin()

    def forward(self, embed, taps, tokens, anchors, start=0):
        """Hidden rows [b, a, N, h] of the blocks at anchors [b, a], which count from the window's
        first position start. taps [b, s, T*h], tokens [b, s], embed [vocab, h]."""
        context = self.r(self.context_norm(self.r(self.context_proj(taps))))
        s = taps.shape[1]
        ids = torch.full((*anchors.shape, self.rows), self.config["mask_token_id"])
        ids[..., 0] = tokens.gather(1, anchors)
        seen = torch.zeros(*anchors.shape, s)
        seen.masked_fill_(torch.arange(s) >= anchors[..., None], float("-inf"))
        tables = (self.table(torch.arange(start, start + s)),
                  self.table(start + anchors[..., None] + torch.arange(self.rows)))
        x = F.embedding(ids, embed)
        for layer in self.layers:
            x = layer(x, context, seen, tables, self.r)
        return self.r(self.final_norm(x))

    def bias(self, previous):
        """Markov embedding and bias of the logits behind the tokens previous."""
        e = self.markov_head.markov_w1(previous)
        return e, self.r(self.markov_head.markov_w2(e))

    def confidence(self, hidden, e):
        """Logit of the confidence."""
        return self.confidence_head.proj(torch.cat([hidden, e], dim=-1))[..., 0]

    @torch.no_grad()
    def draft(self, embed, head, taps, tokens, anchors, markov=True):
        """Greedy tokens [b, a, N] and confidences of the blocks."""
        hidden = self.forward(embed, taps, tokens, anchors)
        base = self.r(hidden @ head.T)
        previous, out, sure = tokens.gather(1, anchors), [], []
        for k in range(self.rows):
            e, bias = self.bias(previous)
            sure.append(self.confidence(hidden[:, :, k], e).sigmoid())
            logits = self.r(base[:, :, k] + bias) if markov else base[:, :, k]
            previous = logits.argmax(-1)
            out.append(previous)
        return torch.stack(out, -1), torch.stack(sure, -1)
