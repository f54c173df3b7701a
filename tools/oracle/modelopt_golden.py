#!/usr/bin/env python3
"""Write the golden files of ModelOpt's weights (tests/test_golden_quant.c reads them).

    python3 tools/oracle/modelopt_golden.py OUT_DIR [ALGORITHM ...]

Needs torch, safetensors and nvidia-modelopt (modelopt_export.py). Weights and the file's tensors are
those of quant_golden.py: names of modules, the generator's windows, `special`, "rows.MODULE",
"dequantised.MODULE". config.json and hf_quant_config.json are what ModelOpt's exporter writes. nvfp4
and fp8-channel are cut in two files with an index, scales in another file than their codes.
"""
import json
import os
import sys
import warnings

import modelopt
import torch
from safetensors.torch import save_file

import modelopt_export
from golden_weights import KV0, KV1, KV_ROWS, SEED, UP, special, weight

ODD = {KV0: [576, 32], KV1: [576, 48], UP: [24, 112]}     # 2, 3 and 7 groups of 16
THIRTY_TWO = {KV0: [576, 32], UP: [24, 96]}
BLOCKS = {KV0: [576, 128], UP: [130, 136]}
GEOMETRY = {"nvfp4": ODD, "nvfp4-a16": {KV0: [576, 16], UP: [5, 48]}, "fp8": ODD,
            "fp8-channel": {KV0: [576, 24], UP: [24, 40]}, "fp8-block": BLOCKS, "mxfp8": THIRTY_TWO,
            "mxfp4-fp8": THIRTY_TWO, "int8": {KV0: [576, 24], UP: [24, 40]}}
KEPT = "layers.1.mlp.gate_proj"  # BF16 beside quantised modules


def make(algorithm):
    weights = {name: weight(name, shape) for name, shape in GEOMETRY[algorithm].items()}
    weights["special"] = special()
    weights[KEPT] = weight(KEPT, [16, 128])
    tensors, config, hf_config, back = modelopt_export.export(weights, algorithm, [KEPT])
    for name, values in back.items():
        rows = torch.tensor(KV_ROWS if values.shape[0] == 576 else list(range(values.shape[0])))
        tensors["rows." + name] = rows
        tensors["dequantised." + name] = values[rows].contiguous()
    tensors["weight.special"] = weights["special"]
    return tensors, config, hf_config


def write_json(path, value):
    with open(path, "w") as f:
        json.dump(value, f, indent=1)
        f.write("\n")


def main():
    warnings.simplefilter("ignore")
    out_dir, names = sys.argv[1], sys.argv[2:]
    for name in names or modelopt_export.ALGORITHMS:
        tensors, config, hf_config = make(name)
        about = {"format": "pt", "seed": str(SEED), "made_by": "nvidia-modelopt " + modelopt.__version__,
                 "script": "tools/oracle/modelopt_golden.py " + name}
        directory = os.path.join(out_dir, name)
        os.makedirs(directory, exist_ok=True)
        files = {"model.safetensors": tensors}
        if name in ("nvfp4", "fp8-channel"):
            second = {k: v for k, v in tensors.items() if "scale" in k}
            first = {k: v for k, v in tensors.items() if k not in second}
            files = {"model-00001-of-00002.safetensors": first,
                     "model-00002-of-00002.safetensors": second}
            write_json(os.path.join(directory, "model.safetensors.index.json"),
                       {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
                        "weight_map": {k: f for f, part in files.items() for k in sorted(part)}})
        write_json(os.path.join(directory, "config.json"), {"quantization_config": config})
        write_json(os.path.join(directory, "hf_quant_config.json"), hf_config)
        for file, part in files.items():
            path = os.path.join(directory, file)
            save_file(part, path, about)
            os.chmod(path, 0o644)
            print("%8d %s" % (os.path.getsize(path), path))


if __name__ == "__main__":
    main()
