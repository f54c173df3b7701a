#!/usr/bin/env python3
"""Read what `dspark quantize` wrote with compressed-tensors and safetensors, and compare every weight
with the library's own way back, bit for bit.

    dspark quantize CKPT Q --format F
    dspark quantize Q B --format bf16
    python3 tools/oracle/check_quant.py Q B

Needs torch, safetensors and compressed-tensors. Q's config is parsed and its targets and ignore list are
matched by compressed-tensors; each quantised module is decompressed by it and rounded to bf16. NVFP4
values may lie one bf16 step apart where the library's division and our reciprocal fall on two sides of
a tie: they are counted, and more than 1 in 10000 is a failure. ModelOpt's layout is decoded by
ModelOpt itself where nvidia-modelopt is installed, else by its formulas; the last line says which.
Ends with 1 when something differs.
"""
import glob
import json
import os
import sys

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name
from safetensors import safe_open


def load(directory):
    """Every tensor, through the index where there is one."""
    index = os.path.join(directory, "model.safetensors.index.json")
    tensors = {}
    if os.path.exists(index):
        with open(index) as f:
            where = json.load(f)["weight_map"]
    else:
        where = None
    for path in sorted(glob.glob(os.path.join(directory, "*.safetensors"))):
        with safe_open(path, framework="pt") as f:
            for name in f.keys():
                if where is not None and where.pop(name) != os.path.basename(path):
                    sys.exit("%s: the index says another file" % name)
                tensors[name] = f.get_tensor(name)
    if where:
        sys.exit("%s: in the index and in no file" % next(iter(where)))
    return tensors


def find_modelopt():
    try:
        import modelopt_export  # takes seconds: only when it is needed
    except ImportError:
        return None
    return modelopt_export


def modelopt(modelopt_export, parts, algorithm):
    if modelopt_export:
        return modelopt_export.dequantise(parts, "fp8" if algorithm == "FP8" else "nvfp4")
    if parts["weight"].dtype == torch.uint8:
        rows, half = parts["weight"].shape
        codes = unpack_fp4_from_uint8(parts["weight"], rows, 2 * half, torch.float32)
        scale = parts["weight_scale"].float() * parts["weight_scale_2"]
        return codes * scale.repeat_interleave(16, 1)
    return parts["weight"].float() * parts["weight_scale"]


def main():
    quantised, back = load(sys.argv[1]), load(sys.argv[2])
    with open(os.path.join(sys.argv[1], "config.json")) as f:
        config = json.load(f)["quantization_config"]
    modules = {}
    for name, tensor in quantised.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = tensor
    compressed = config["quant_method"] == "compressed-tensors"
    modelopt_export = None if compressed else find_modelopt()
    if compressed:
        scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
        compressor = BaseCompressor.get_value_from_registry(config["format"])
    bad = apart = total = n_modules = 0
    for module, parts in modules.items():
        ignored = any(match_name(module, rule) for rule in config["ignore"])
        if "weight_scale" not in parts:
            weight = parts.get("weight")
            if weight is not None and weight.dim() == 2 and not ignored:
                print("%s: not quantised and not ignored" % module)
                bad += 1
            for suffix, tensor in parts.items():
                if not torch.equal(tensor, back["%s.%s" % (module, suffix)]):
                    print("%s.%s: differs" % (module, suffix))
                    bad += 1
            continue
        if ignored:
            print("%s: quantised and ignored" % module)
            bad += 1
        theirs = (compressor.decompress(parts, scheme)["weight"] if compressed
                  else modelopt(modelopt_export, parts, config["quant_algo"]))
        theirs, ours = theirs.bfloat16(), back[module + ".weight"]
        if ours.dtype != torch.bfloat16 or ours.shape != theirs.shape:
            sys.exit("%s: %s %s, expected bf16 %s" % (module, ours.dtype, ours.shape, theirs.shape))
        steps = (theirs.view(torch.int16).int() - ours.view(torch.int16).int()).abs()
        steps[theirs == ours] = 0  # zeros of both signs
        n_modules += 1
        total += steps.numel()
        apart += int((steps == 1).sum())
        if bool((steps > 1).any()):
            print("%s: %d values more than one step apart" % (module, int((steps > 1).sum())))
            bad += 1
    nvfp4 = "nvfp4" in (config.get("format") or config["quant_algo"]).lower()
    print("%-22s %3d modules %9d values, %d one step apart, %d wrong (%s)"
          % (config.get("format") or config["quant_algo"], n_modules, total, apart, bad,
             "compressed-tensors" if compressed else "ModelOpt" if modelopt_export else "formulas"))
    sys.exit(1 if bad or not n_modules or apart > (total / 10000 if nvfp4 else 0) else 0)


if __name__ == "__main__":
    main()
