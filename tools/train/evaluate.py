"""Measures a written pair in PyTorch: held-out loss of the target, acceptance of the drafter.

    python evaluate.py --text tinyshakespeare.txt --pair models/tiny-shakespeare

The target continues held-out prompts greedily; the drafter drafts greedily from every position of
those continuations, and a draft counts as accepted up to its first token that is not the target's.
Weights are the bf16 ones; --served also rounds where serving rounds.
"""
import argparse
import json
import os

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import data
from drafter import Drafter
from target import Target


@torch.no_grad()
def held_out_loss(model, held_out, length=512):
    """Nats a byte over the held-out text, in windows without a common context."""
    x = data.windows(held_out, range(0, len(held_out) - length, length), length + 1)
    total = 0.0
    for part in x.split(8):
        states, _ = model(part[:, :-1])
        total += F.cross_entropy(model.lm_head(states).flatten(0, 1), part[:, 1:].flatten(),
                                 reduction="sum").item()
    return total / (x.shape[0] * length)


@torch.no_grad()
def continuations(target, held_out, prompts=200, length=64, count=256):
    """Greedy continuations [prompts, length + count] and the taps' input ids."""
    x = torch.tensor([list(p) for p in data.held_out_prompts(held_out, prompts, length)])
    return target.generate(x, count)


@torch.no_grad()
def acceptance(target, drafter, ids, first, markov=True):
    """Accepted drafts [b, a] and confidences [b, a, N] of the anchors first, first + 1, ..."""
    anchors = torch.arange(first, ids.shape[1] - drafter.rows)
    accepted, sure = [], []
    for part in ids.split(20):
        _, taps = target(part, taps=drafter.config["target_layer_ids"])
        taps = torch.cat(taps, dim=-1).bfloat16().float()
        at = anchors.expand(part.shape[0], -1)
        tokens, c = drafter.draft(target.model.embed_tokens.weight, target.lm_head.weight, taps,
                                  part, at, markov)
        truth = part.unfold(1, drafter.rows, 1)[:, first + 1:first + 1 + len(anchors)]
        accepted.append((tokens == truth).long().cumprod(-1).sum(-1))
        sure.append(c)
    return torch.cat(accepted), torch.cat(sure)


def walk(accepted):
    """The accepted counts of the steps a generation really takes: each step moves on by the
    accepted drafts and the target's own token."""
    steps = []
    for row in accepted.tolist():
        at = 0
        while at < len(row):
            steps.append(row[at])
            at += row[at] + 1
    return torch.tensor(steps)


def summary(counts, rows):
    reached = [int((counts >= k).sum()) for k in range(rows + 1)]
    return {
        "steps": len(counts),
        "accepted_drafts": round(counts.float().mean().item(), 3),
        "acceptance_length": round(counts.float().mean().item() + 1, 3),
        "by_position": [round(reached[k] / len(counts), 3) for k in range(1, rows + 1)],
        "conditional": [round(reached[k] / max(reached[k - 1], 1), 3) for k in range(1, rows + 1)],
        "histogram": [int((counts == k).sum()) for k in range(rows + 1)],
    }


def measure(target, drafter, held_out, prompts=200, quick=False):
    """quick: acceptance only."""
    ids, out = continuations(target, held_out, prompts), {}
    if not quick:
        out["target_loss_held_out"] = round(held_out_loss(target, held_out), 4)
    for name, markov in (("markov", True), ("without_markov", False)):
        accepted, sure = acceptance(target, drafter, ids, 64, markov)
        steps = walk(accepted)
        out[name] = summary(steps, drafter.rows)
        out[name]["every_anchor_acceptance_length"] = round(accepted.float().mean().item() + 1, 3)
        if markov:
            hit = (accepted[..., None] > torch.arange(drafter.rows)).float()
            out[name]["confidence_brier"] = round(
                (sure.cumprod(-1) - hit).square().mean().item(), 4)
    if quick:
        return out
    # the held-out text itself: would the drafts have been its next bytes
    text = data.windows(held_out, range(0, len(held_out) - 320, 640), 320)
    accepted, _ = acceptance(target, drafter, text, 64)
    out["held_out_text_every_anchor_acceptance_length"] = round(
        accepted.float().mean().item() + 1, 3)
    return out


def read(pair):
    target, drafter = Target(), Drafter()
    for module, name in ((target, "target"), (drafter, "drafter")):
        tensors = load_file(os.path.join(pair, name, "model.safetensors"))
        module.load_state_dict({k: v.float() for k, v in tensors.items()})
        module.requires_grad_(False)
    return target, drafter


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", required=True)
    parser.add_argument("--pair", required=True)
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _, held_out, _ = data.load(args.text)
    target, drafter = read(args.pair)
    drafter.served = args.served
    print(json.dumps(measure(target, drafter, held_out, args.prompts), indent=2))


if __name__ == "__main__":
    main()
