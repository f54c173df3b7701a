#!/usr/bin/env python3
"""Write golden files of formats that are read and never written (tests/test_golden_quant.c reads them).

    python3 tools/oracle/quant_read_golden.py OUT_DIR

Needs what quant_golden.py needs; files are laid out as its are, with the config.json that
compressed-tensors makes. Run it twice: with compressed-tensors 0.18 or newer, whose packed integers are
one string of bits, and with 0.17.1 or older, which put whole codes into words and still had g_idx.
Each run writes the formats of its library.
"""
import json
import os
import sys

import compressed_tensors
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (QuantizationArgs, QuantizationConfig, QuantizationScheme)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

from golden_weights import KV0, KV1, KV_ROWS, SEED, UP, weight
from quant_golden import ranges

PACKED = "pack-quantized"
GROUPS = {KV0: [576, 64], KV1: [40, 96], UP: [21, 160]}  # 2, 3 and 5 groups of 32


def integer(bits, symmetric, strategy="group", **more):
    if strategy == "group":
        more["group_size"] = 32
    return dict(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, **more)


NEW = {
    "fp8-group": ("float-quantized", dict(num_bits=8, type="float", strategy="group", group_size=32)),
    "int8-asym": ("int-quantized", integer(8, False, "channel")),
    "int8-packed": (PACKED, integer(8, True)),
    "int4-asym": (PACKED, integer(4, False)),
    "int4-channel": (PACKED, integer(4, True, "channel")),
    "int2": (PACKED, integer(2, False)),
    "int3": (PACKED, integer(3, True)),
    "int3-asym": (PACKED, integer(3, False)),
    "int5": (PACKED, integer(5, False)),
    "int6": (PACKED, integer(6, True)),
    "int7": (PACKED, integer(7, False)),
}
OLD = {
    "int4-gidx": (PACKED, integer(4, False, actorder="group")),
    "int3-old": (PACKED, integer(3, False)),
    "int5-old": (PACKED, integer(5, True)),
    "int6-old": (PACKED, integer(6, False)),
    "int7-old": (PACKED, integer(7, True)),
}


def quantise(compressor_name, args, w, seed):
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args),
                                format=compressor_name)
    compressor = BaseCompressor.get_value_from_registry(compressor_name)
    state = {"weight": w.float()}
    if args.get("actorder"):
        order = torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(seed))
        state["weight_g_idx"] = (torch.arange(w.shape[1]) // 32)[order].int()
        low, high = ranges(state["weight"][:, torch.argsort(state["weight_g_idx"], stable=True)],
                           scheme.weights)
    else:
        low, high = ranges(state["weight"], scheme.weights)
    scale, zero_point = calculate_qparams(low, high, scheme.weights, None)
    state["weight_scale"] = scale.bfloat16()
    if not scheme.weights.symmetric:
        state["weight_zero_point"] = zero_point.to(torch.int8)
    packed = compressor.compress(state, scheme)
    back = compressor.decompress(packed, scheme)["weight"]
    return {k: v.contiguous() for k, v in packed.items() if v is not None}, back, scheme


def main():
    version = compressed_tensors.__version__
    old = tuple(int(part) for part in version.split(".")[:2]) < (0, 18)
    for name, (compressor_name, args) in (OLD if old else NEW).items():
        tensors = {}
        for seed, (module, shape) in enumerate(GROUPS.items()):
            packed, back, scheme = quantise(compressor_name, args, weight(module, shape), seed)
            for suffix, t in packed.items():
                tensors["%s.%s" % (module, suffix)] = t
            rows = torch.tensor(KV_ROWS if shape[0] == 576 else list(range(shape[0])))
            tensors["rows." + module] = rows
            tensors["dequantised." + module] = back[rows].contiguous()
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=compressor_name,
                                    quantization_status="compressed", ignore=["lm_head"])
        config = dict(json.loads(config.model_dump_json()), quant_method="compressed-tensors",
                      version=version)
        directory = os.path.join(sys.argv[1], name)
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, "config.json"), "w") as f:
            json.dump({"quantization_config": config}, f, indent=1)
            f.write("\n")
        path = os.path.join(directory, "model.safetensors")
        save_file(tensors, path, {"format": "pt", "seed": str(SEED),
                                  "script": "tools/oracle/quant_read_golden.py",
                                  "made_by": "compressed-tensors " + version})
        os.chmod(path, 0o644)
        print("%8d %s" % (os.path.getsize(path), path))


if __name__ == "__main__":
    main()
