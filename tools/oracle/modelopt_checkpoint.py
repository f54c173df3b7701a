#!/usr/bin/env python3
"""Quantise a whole BF16 checkpoint with ModelOpt, in several shards, and check how another reader takes it.

    python3 tools/oracle/modelopt_checkpoint.py write CKPT OUT ALGORITHM
    dspark inspect OUT
    dspark quantize OUT BACK --format bf16
    python3 tools/oracle/modelopt_checkpoint.py check OUT BACK

`write` quantises what `dspark quantize` does by default: each matrix but embeddings and heads; kv_b_proj
of odd layers stays BF16 by exclusion, as does what no whole groups fit; other kv_b_proj are quantised. What ModelOpt takes its own codes
back to lies beside the checkpoint, in OUT.back.safetensors. `check` wants BACK to be the same bf16
values, NVFP4 up to one step where products are rounded on two sides of a tie (at most 1 in 10000).
"""
import json
import os
import sys
import warnings

import torch
from safetensors.torch import load_file, save_file

N_SHARDS = 3


def write(source, out, algorithm):
    import modelopt_export

    tensors = load_file(os.path.join(source, "model.safetensors"))
    with open(os.path.join(source, "config.json")) as f:
        config = json.load(f)
    weights, rest = {}, {}
    for name, tensor in tensors.items():
        module = name[:-len(".weight")] if name.endswith(".weight") else ""
        linear = tensor.dim() == 2 and (module.startswith("layers.") or module == "context_proj")
        if linear:
            weights[module] = tensor
        else:
            rest[name] = tensor
    columns = modelopt_export.ALGORITHMS[algorithm][1]
    keep = [name for name, w in weights.items() if columns <= 32 and w.shape[1] % columns
            or name.endswith("kv_b_proj") and int(name.split(".")[1]) % 2]
    made, quant, hf_quant, back = modelopt_export.export(weights, algorithm, keep)
    # ModelOpt saw the linear layers only: name what it did not see.
    for part in quant["ignore"], hf_quant["quantization"]["exclude_modules"]:
        part += ["lm_head", "embed_tokens", "markov_head*", "confidence_head*"]
    made.update(rest)
    os.makedirs(out)
    names = sorted(made)
    index = {"metadata": {"total_size": sum(t.nbytes for t in made.values())}, "weight_map": {}}
    for i in range(N_SHARDS):  # neighbours in name end up in different shards, a scale apart from its codes
        file = "model-%05d-of-%05d.safetensors" % (i + 1, N_SHARDS)
        part = {name: made[name] for name in names[i::N_SHARDS]}
        save_file(part, os.path.join(out, file), {"format": "pt"})
        index["weight_map"].update({name: file for name in part})
    config["quantization_config"] = quant
    for file, value in ("model.safetensors.index.json", index), ("config.json", config), \
            ("hf_quant_config.json", hf_quant):
        with open(os.path.join(out, file), "w") as f:
            json.dump(value, f, indent=1)
    save_file({name + ".weight": w.bfloat16().contiguous() for name, w in back.items()},
              out + ".back.safetensors")


def check(quantised, back):
    theirs = load_file(quantised + ".back.safetensors")
    ours = {}
    for file in os.listdir(back):
        if file.endswith(".safetensors"):
            ours.update(load_file(os.path.join(back, file)))
    with open(os.path.join(quantised, "config.json")) as f:
        algorithm = json.load(f)["quantization_config"]["quant_algo"]
    apart = wrong = total = 0
    for name, w in theirs.items():
        steps = (w.view(torch.int16).int() - ours[name].view(torch.int16).int()).abs()
        steps[w == ours[name]] = 0  # zeros of both signs
        apart += int((steps == 1).sum())
        wrong += int((steps > 1).sum())
        total += steps.numel()
    print("%-26s %3d modules %9d values, %d one step apart, %d wrong (written by ModelOpt)"
          % (algorithm, len(theirs), total, apart, wrong))
    sys.exit(1 if wrong or not theirs or apart > (total / 10000 if "NVFP4" in algorithm else 0) else 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"write": write, "check": check}[sys.argv[1]](*sys.argv[2:])
