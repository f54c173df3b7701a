#!/usr/bin/env python3
"""Write the golden files of quantised weights (tests/test_golden_quant.c reads them).

    python3 tools/oracle/quant_golden.py OUT_DIR [FORMAT ...]

Needs torch, numpy, safetensors and compressed-tensors. Scales, codes and dequantised values are made by
compressed-tensors on the CPU; nothing here reads what the C library wrote. The weight of a module is a
window of the synthetic generator (generator.py: name + ".weight", seed in the metadata), except
`special`, whose BF16 weight is stored as "weight.special": zeros, ties, subnormals, outliers.

A file holds, for each module: its compressed tensors; "dequantised.MODULE", what the library's own
decompression gives for the rows of "rows.MODULE", in its dtype. nvfp4 is cut in two files with an index,
scales in another file than their codes.
"""
import json
import os
import sys

import compressed_tensors
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

from golden_weights import KV0, KV1, KV_ROWS, SEED, UP, special, weight

FLOAT8 = dict(num_bits=8, type="float", symmetric=True)
FLOAT4 = dict(num_bits=4, type="float", symmetric=True)
# format: compressor, weight args, dtype of the stored scale (None: the compressor's), geometries
FORMATS = {
    "fp8-tensor": ("float-quantized", dict(FLOAT8, strategy="tensor"), torch.float32, None),
    "fp8-channel": ("float-quantized", dict(FLOAT8, strategy="channel"), torch.float32, None),
    "fp8-block": ("float-quantized", dict(FLOAT8, strategy="block", block_structure=[128, 128]),
                  torch.float32, {KV0: [576, 32], UP: [130, 136]}),
    "nvfp4": ("nvfp4-pack-quantized", dict(FLOAT4, strategy="tensor_group", group_size=16,
                                           scale_dtype=torch.float8_e4m3fn), None, None),
    "mxfp4": ("mxfp4-pack-quantized", dict(FLOAT4, strategy="group", group_size=32,
                                           scale_dtype=torch.uint8), None, None),
    "mxfp8": ("mxfp8-quantized", dict(FLOAT8, strategy="group", group_size=32,
                                      scale_dtype=torch.uint8), None, None),
    "int8": ("int-quantized", dict(num_bits=8, type="int", strategy="channel",
                                   scale_dtype=torch.bfloat16), torch.bfloat16, None),
    "int4": ("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=128,
                                    scale_dtype=torch.bfloat16), torch.bfloat16,
             {KV0: [576, 128], KV1: [40, 384]}),
}
USUAL = {KV0: [576, 32], KV1: [576, 32], UP: [24, 96]}


def ranges(w, args):
    """min and max of what each scale serves, in the scale's shape."""
    rows, k = w.shape
    if args.strategy == "tensor":
        return w.min(), w.max()
    if args.strategy == "channel":
        return w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    if args.strategy == "block":
        bh, bw = args.block_structure
        grid = [[w[r:r + bh, c:c + bw] for c in range(0, k, bw)] for r in range(0, rows, bh)]
        return (torch.stack([torch.stack([b.min() for b in row]) for row in grid]),
                torch.stack([torch.stack([b.max() for b in row]) for row in grid]))
    groups = w.reshape(rows, k // args.group_size, args.group_size)
    return groups.amin(-1), groups.amax(-1)


def quantise(name, w):
    compressor_name, args, scale_dtype, _ = FORMATS[name]
    args = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(compressor_name)
    state = {"weight": w.float()}
    low, high = ranges(state["weight"], args)
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(w.float().min(), w.float().max())
    state["weight_scale"], _ = calculate_qparams(low, high, args, state.get("weight_global_scale"))
    packed = compressor.compress(state, scheme)
    if scale_dtype:
        packed["weight_scale"] = packed["weight_scale"].to(scale_dtype)
    back = compressor.decompress(packed, scheme)["weight"]
    return {k: v for k, v in packed.items() if v is not None}, back


def make(name):
    geometry = FORMATS[name][3] or USUAL
    tensors = {}
    for module, shape in [*geometry.items(), ("special", None)]:
        w = weight(module, shape) if shape else special()
        packed, back = quantise(name, w)
        for suffix, t in packed.items():
            tensors["%s.%s" % (module, suffix)] = t.contiguous()
        rows = torch.tensor(KV_ROWS if w.shape[0] == 576 else list(range(w.shape[0])))
        tensors["rows." + module] = rows
        tensors["dequantised." + module] = back[rows].contiguous()
        if not shape:
            tensors["weight.special"] = w
    return tensors


def main():
    out_dir, names = sys.argv[1], sys.argv[2:]
    for name in names or FORMATS:
        tensors = make(name)
        about = {"format": "pt", "seed": str(SEED), "script": "tools/oracle/quant_golden.py " + name,
                 "made_by": "compressed-tensors " + compressed_tensors.__version__}
        directory = os.path.join(out_dir, name)
        os.makedirs(directory, exist_ok=True)
        files = {"model.safetensors": tensors}
        if name == "nvfp4":
            second = {k: v for k, v in tensors.items() if "scale" in k}
            first = {k: v for k, v in tensors.items() if k not in second}
            files = {"model-00001-of-00002.safetensors": first,
                     "model-00002-of-00002.safetensors": second}
            index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
                     "weight_map": {k: f for f, part in files.items() for k in sorted(part)}}
            with open(os.path.join(directory, "model.safetensors.index.json"), "w") as f:
                json.dump(index, f, indent=1, sort_keys=True)
                f.write("\n")
        for file, part in files.items():
            path = os.path.join(directory, file)
            save_file(part, path, about)
            os.chmod(path, 0o644)
            print("%8d %s" % (os.path.getsize(path), path))


if __name__ == "__main__":
    main()
