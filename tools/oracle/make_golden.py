#!/usr/bin/env python3
"""Write the golden files of tests/data/golden (tests/test_golden.c and test_synth.c read them).

    python3 tools/oracle/make_golden.py OUT_DIR [NAME ...]

Needs torch, numpy and safetensors. Nothing here reads what the C library wrote. A file's metadata
says how to make the inputs again: preset, settings (one a line), seed, dump_seed, tokens. Tensors:

    positions    [n] I64                position of each row of the dump
    rows         [m] I64                the rows whose results are stored
    states       [s, h] BF16            states of the first s of these rows
    entries      [L, m, C+R] BF16
    entries_f32  [L, m, C+R] F32        before the last rounding (not for the largest)
    entries_f64  [L, m, C+R] F64        no rounding in between (not for the largest)
    row_sums     [L, n, 2] F64          per entry: sum of values, sum of magnitudes (large files)

rope-*.safetensors hold cos and sin rows, generator.safetensors values of the generator.
"""
import json
import os
import sys

import numpy as np
import torch
from safetensors.torch import save_file

import generator
from rope import Rope
from twin import SyntheticWeights, Twin, bf16_from_bits

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0}
K3 = {"hidden_size": 7168, "num_hidden_layers": 5, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
      "rms_norm_eps": 1e-5, "target_hidden_size": 7168, "target_layer_ids": [2, 23, 47, 71, 89],
      "rope_theta": 50000.0, "rope_parameters": YARN, "vocab_size": 163840}
# What the context path reads of each preset's config.
PRESETS = {
    "kimi-k3": K3,
    "tiny": dict(K3, hidden_size=64, kv_lora_rank=16, qk_rope_head_dim=8, target_hidden_size=64,
                 target_layer_ids=[1, 2, 4, 5, 7], vocab_size=97),
}

EDGES = [0, 1, 2, 4095, 32767, 32768, 131071, 262144, 1048575]
K3_POSITIONS = [1048575, 0, 1, 4095, 32768, 131071, 524287] + [
    (i * 16644 + 3) % 1048576 for i in range(7, 64)]

# name: preset, settings, seed, positions, rows stored (None: all), rows of states stored
CASES = {
    "tiny-yarn": ("tiny", [], 1, EDGES, None),
    "tiny-plain": ("tiny", ["rope_parameters=null"], 2, EDGES, None),
    "tiny-fcnorm": ("tiny", ["fc_norm=true"], 3, EDGES, None),
    "tiny-pro": ("tiny", ["num_attention_heads=96", "is_causal=true", "markov_rank=16"], 4, EDGES,
                 None),
    "tiny-3layers": ("tiny", ["num_hidden_layers=3"], 5, EDGES, None),
    "tiny-tapwidth": ("tiny", ["target_hidden_size=80", "fc_norm=true"], 6, EDGES, None),
    "tiny-taps": ("tiny", ["target_layer_ids=[0, 3, 6]"], 7, EDGES, None),
    "tiny-lightseek": ("tiny", ["rope_parameters=null", "fc_norm=true", "hidden_size=50",
                                "aux_hidden_stream=attn_res", "kv_lora_rank=19",
                                "qk_rope_head_dim=6", "rope_theta=10000.0"], 8, EDGES, None),
    "tiny-mscale": ("tiny", ["rope_parameters.mscale=0.7", "rope_parameters.mscale_all_dim=1.3",
                             "rope_parameters.factor=4.0", "rope_parameters.beta_fast=16",
                             "rope_parameters.original_max_position_embeddings=1000",
                             "qk_rope_head_dim=16", "rms_norm_eps=1e-3"], 9, EDGES, None),
    "k3": ("kimi-k3", [], 20260808, K3_POSITIONS, [0, 1, 2, 3, 4, 5, 6, 31, 62, 63]),
}
K3_STATES = 7

ROPES = {
    "rope-yarn": {"qk_rope_head_dim": 64, "rope_parameters": YARN},
    "rope-plain": {"qk_rope_head_dim": 64, "rope_theta": 50000.0},
}


def apply(config, settings):
    """The settings that the twin's keys know; config.json's other keys do not reach it."""
    config = json.loads(json.dumps(config))
    named = {}
    for s in settings:
        key, value = s.split("=", 1)
        try:
            value = json.loads(value)
        except ValueError:
            pass
        named[key] = value
        at, *rest = key.split(".")
        holder = config
        if rest:
            holder, at = config[at], rest[0]
        if value is None:
            holder.pop(at, None)
        else:
            holder[at] = value
    if "hidden_size" in named and "target_hidden_size" not in named:
        config["target_hidden_size"] = config["hidden_size"]
    return config


def make_case(name):
    preset, settings, seed, positions, rows = CASES[name]
    config = apply(PRESETS[preset], settings)
    dump_seed, n = seed + 1000, len(positions)
    n_taps, width = len(config["target_layer_ids"]), config["target_hidden_size"]
    dump = bf16_from_bits(generator.tensor("hidden_states", [n, n_taps + 1, width], dump_seed))
    taps = dump[:, :n_taps].reshape(n, n_taps * width)
    small = rows is None
    out = Twin(config, SyntheticWeights(seed)).run(taps, positions, with_f64=small)
    rows = list(range(n)) if small else rows
    tensors = {"positions": out["positions"], "rows": torch.tensor(rows),
               "states": out["states"][rows][: n if small else K3_STATES],
               "entries": out["entries"][:, rows]}
    if small:
        tensors["entries_f32"] = out["entries_f32"]
        tensors["entries_f64"] = out["entries_f64"]
    else:
        e = out["entries"].double()
        tensors["row_sums"] = torch.stack([e.sum(-1), e.abs().sum(-1)], -1)
    about = {"preset": preset, "settings": "\n".join(settings), "seed": str(seed),
             "dump_seed": str(dump_seed), "tokens": str(n)}
    return tensors, about


def make_rope(name):
    rope = Rope(ROPES[name])
    cos, sin = rope.table(EDGES)
    return ({"positions": torch.tensor(EDGES), "cos": torch.from_numpy(cos),
             "sin": torch.from_numpy(sin), "frequencies": torch.from_numpy(rope.frequencies())},
            {"theta": "50000.0"})


def make_generator():
    """Windows of streams: names as they occur, starts small, unaligned and beyond 2^32."""
    streams = [("context_proj.weight", 35840), ("layers.4.self_attn.kv_a_proj_with_mqa.weight", 7168),
               ("context_norm.weight", 7168), ("fc_norm.3.weight", 7168),
               ("layers.0.self_attn.kv_a_layernorm.weight", 512), ("embed_tokens.weight", 7168),
               ("confidence_head.proj.bias", 1), ("confidence_head.proj.weight", 7424),
               ("markov_head.markov_w1.weight", 256), ("markov_head.markov_w2.weight", 256),
               ("hidden_states", 7168), ("layers.2.mlp.down_proj.weight", 14336)]
    starts = [0, 5, 1022, (1 << 33) + 3]
    seeds = [0, 7, (1 << 64) - 1]
    tensors = {"starts": torch.tensor(starts)}
    for name, last_axis in streams:
        bits = np.stack([np.stack([generator.values(name, last_axis, s, at, 11) for at in starts])
                         for s in seeds])
        tensors["%s:%d" % (name, last_axis)] = bf16_from_bits(bits)
    tensors["token_ids"] = torch.from_numpy(
        np.stack([generator.token_ids(s, 64, 163840) for s in seeds]))
    return tensors, {"seeds": " ".join(str(s) for s in seeds)}


def main():
    out_dir, names = sys.argv[1], sys.argv[2:]
    for name in names or [*CASES, *ROPES, "generator"]:
        if name in CASES:
            tensors, about = make_case(name)
        elif name in ROPES:
            tensors, about = make_rope(name)
        else:
            tensors, about = make_generator()
        path = os.path.join(out_dir, name + ".safetensors")
        about["script"] = "tools/oracle/make_golden.py " + name
        save_file({k: v.contiguous() for k, v in tensors.items()}, path, about)
        os.chmod(path, 0o644)
        print("%8d %s" % (os.path.getsize(path), path))


if __name__ == "__main__":
    main()
