"""Writes a trained module as a checkpoint: config.json and model.safetensors in bf16."""
import json
import os

import torch
from safetensors.torch import save_file


def write(module, config, folder):
    """Both files appear whole or not at all."""
    os.makedirs(folder, exist_ok=True)
    tensors = {k: v.detach().bfloat16().contiguous() for k, v in module.state_dict().items()}
    path = os.path.join(folder, "model.safetensors")
    save_file(tensors, path + ".new", metadata={"format": "pt"})
    os.chmod(path + ".new", 0o644)
    os.replace(path + ".new", path)
    path = os.path.join(folder, "config.json")
    with open(path + ".new", "w") as f:
        json.dump(config, f, indent=2)
        f.write("\n")
    os.replace(path + ".new", path)


def round_weights(module):
    """The weights as they are served: rounded to bf16, kept in fp32."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(p.bfloat16().float())
    return module.requires_grad_(False)
