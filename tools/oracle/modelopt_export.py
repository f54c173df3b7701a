"""Quantise linear layers with NVIDIA's ModelOpt and export them as its own exporter does.

export() takes weights by name and gives the tensors of a checkpoint, the config in both spellings, and
each weight as ModelOpt itself takes it back: fp32, and bf16 for NVFP4, whose product of three it rounds
twice. Nothing here knows what the C library does.
Needs nvidia-modelopt (and requests, which it forgets to ask for); runs on the CPU.
"""
import copy

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.export.quant_utils import get_quant_config, postprocess_state_dict
from modelopt.torch.export.unified_export_hf import _export_quantized_weight
from modelopt.torch.quantization.qtensor import (FP8QTensor, INT8QTensor, MXFP4QTensor, MXFP8QTensor,
                                                 NVFP4QTensor)

# name: ModelOpt's configuration, columns that share a scale
ALGORITHMS = {
    "nvfp4": (mtq.NVFP4_DEFAULT_CFG, 16),
    "nvfp4-a16": (mtq.W4A16_NVFP4_CFG, 16),
    "fp8": (mtq.FP8_DEFAULT_CFG, 1),
    "fp8-channel": (mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, 1),
    "fp8-block": (mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, 128),
    "mxfp8": (mtq.MXFP8_DEFAULT_CFG, 32),
    "mxfp4-fp8": (mtq.W4A8_MXFP4_FP8_CFG, 32),
    "int8": (mtq.INT8_WEIGHT_ONLY_CFG, 1),
}


def tree(weights):
    """A module with a Linear under each dotted name; its forward runs every one."""
    root = torch.nn.Module()
    for name, weight in weights.items():
        at = root
        *path, last = name.split(".")
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
        at.add_module(last, linear)
    return root


def calibrate(model):
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module(torch.randn(4, module.in_features, generator=generator))


def dequantise(parts, algorithm):
    """ModelOpt's own way back of one module."""
    codes, scale, shape = parts["weight"], parts["weight_scale"], list(parts["weight"].shape)
    if algorithm.startswith("nvfp4"):
        shape[1] *= 2
        return NVFP4QTensor(shape, torch.bfloat16, codes).dequantize(
            torch.bfloat16, scale=scale, double_scale=parts["weight_scale_2"], block_sizes={-1: 16})
    if algorithm == "mxfp4-fp8":
        shape[1] *= 2
        return MXFP4QTensor(shape, torch.float32, codes).dequantize(
            torch.float32, scale=scale, block_sizes={-1: 32})
    if algorithm == "mxfp8":
        return MXFP8QTensor(shape, torch.float32, codes).dequantize(
            torch.float32, scale=scale, block_sizes={-1: 32})
    if algorithm == "int8":
        return INT8QTensor(shape, torch.float32, codes).dequantize(
            torch.float32, scale=scale.reshape(-1, 1))
    if algorithm == "fp8-block":
        scale = scale.squeeze()
        scale = scale.reshape((shape[0] + 127) // 128, (shape[1] + 127) // 128)
        return FP8QTensor(shape, torch.float32, codes).dequantize(
            torch.float32, scale=scale, block_sizes={-1: 128, -2: 128})
    if algorithm == "fp8-channel":
        scale = scale.reshape(-1, 1)
    return FP8QTensor(shape, torch.float32, codes).dequantize(torch.float32, scale=scale)


def export(weights, algorithm, keep=()):
    """Tensors, quantization_config, hf_quant_config, {name: weight taken back}. Names in `keep` stay BF16."""
    config = copy.deepcopy(ALGORITHMS[algorithm][0])
    model = tree(weights)
    for name in keep:
        config["quant_cfg"].append({"quantizer_name": name + ".*", "enable": False})
    mtq.quantize(model, config, forward_loop=calibrate)
    hf_config = get_quant_config(model)
    for name, module in model.named_modules():
        if name in weights and name not in keep:
            _export_quantized_weight(module, torch.float32)
    tensors = postprocess_state_dict(model.state_dict(), 448, None)
    back = {}
    for name in weights:
        if name in keep:
            tensors[name + ".weight"] = tensors[name + ".weight"].bfloat16()
            continue
        parts = {k[len(name) + 1:]: v for k, v in tensors.items() if k.startswith(name + ".")}
        back[name] = dequantise(parts, algorithm)
    tensors = {k: v.detach().clone().contiguous() for k, v in tensors.items()}
    return tensors, convert_hf_quant_config_format(hf_config), hf_config, back
