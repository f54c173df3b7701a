"""Trains the pair: target, its own generations, drafter. One command, continued where it stopped.

    python train.py --text tinyshakespeare.txt --work DIR --out models/tiny-shakespeare

Stages: target (language model), generate (its own texts), drafter. Each keeps its state in a file
in --work and is skipped or continued when that file is there. --out gets the target when it is
done and the drafter at every checkpoint, so a usable pair exists early.
"""
import argparse
import os

import torch
import torch.nn.functional as F

import data
import evaluate
import export
from drafter import CONFIG as DRAFTER_CONFIG
from drafter import Drafter
from loop import Loop, load_mean, save
from target import CONFIG as TARGET_CONFIG
from target import Target

LENGTH = 1024  # of a window of the drafter's data


def train_target(args, text, held_out):
    model = Target()
    model.reset(data.generator(args.seed, "target"))
    run = Loop("target", model, args.work, args.target_steps, 1.5e-2, 3e-3)
    while not run.done():
        # the last tenth on longer windows, for positions beyond 512
        late = run.step >= 0.9 * run.steps
        x = data.random_windows(text, *((4, 1025) if late else (8, 513)),
                                data.generator(args.seed, "target", run.step))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.lm_head(model(x[:, :-1])[0])
        loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
        if run.update(loss, loss=loss.detach()):
            probe = Target()
            probe.load_state_dict(run.mean)
            export.round_weights(probe)
            print("target: held-out loss %.4f" % evaluate.held_out_loss(probe, held_out),
                  flush=True)


def generate(args, text, target):
    """[n, LENGTH] uint8. Half of the rows are greedy; since greedy text falls into loops, the
    last 32 of every 256 bytes are sampled there, which starts it anew. The other half is sampled, each row
    at its own temperature of 0.5 to 1."""
    path, batch = os.path.join(args.work, "generations.pt"), 128
    rows = torch.load(path, weights_only=True) if os.path.exists(path) else torch.empty(
        0, LENGTH, dtype=torch.uint8)
    while len(rows) < args.generations:
        gen = data.generator(args.seed, "generate", len(rows))
        prompts = data.random_windows(text, batch, 32, gen)
        own = 0.5 + 0.5 * torch.rand(batch, generator=gen)
        greedy = torch.arange(batch) % 2 == 0

        def temperature(position):
            return torch.where(greedy, float(position % 256 >= 224), own)

        made = target.generate(prompts, LENGTH - 32, temperature, gen)
        rows = torch.cat([rows, made.to(torch.uint8)])
        save(path, rows)
        print("generate %d/%d rows" % (len(rows), args.generations), flush=True)
    return rows


class States:
    """Windows of text and generations with what the target makes of them: taps and final states,
    in bf16, computed when first asked for (1.3 kB a byte of text)."""

    def __init__(self, target, rows):
        self.target, self.rows, self.layers = target, rows, DRAFTER_CONFIG["target_layer_ids"]
        h = TARGET_CONFIG["hidden_size"]
        self.known = torch.zeros(len(rows), dtype=torch.bool)
        self.taps = torch.empty(len(rows), LENGTH, len(self.layers) * h, dtype=torch.bfloat16)
        self.final = torch.empty(len(rows), LENGTH, h, dtype=torch.bfloat16)

    def get(self, index):
        new = index[~self.known[index]].unique()
        if len(new):
            with torch.no_grad():
                final, taps = self.target(self.rows[new].long(), taps=self.layers)
            self.taps[new], self.final[new] = torch.cat(taps, -1).bfloat16(), final.bfloat16()
            self.known[new] = True
        return self.rows[index].long(), self.taps[index], self.final[index]


def draft_loss(model, target, tokens, taps, final, anchors, start):
    """The paper's loss: 0.1 cross entropy + 0.9 |draft - target| + 1.0 confidence, rows weighted
    by exp(-k / 4). The Markov head is given the true previous token."""
    n = model.rows
    at = anchors[..., None] + torch.arange(n)                      # [b, a, n]
    flat = at.flatten(1)
    previous = tokens.gather(1, flat).view_as(at)
    label = tokens.gather(1, flat + 1).view_as(at)
    states = final.gather(1, flat[..., None].expand(-1, -1, final.shape[-1]))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(target.model.embed_tokens.weight, taps, tokens, anchors, start)
        e, bias = model.bias(previous)
        logits = F.linear(hidden, target.lm_head.weight) + bias
        sure = model.confidence(hidden, e)
    logits = logits.float().flatten(0, 2)
    with torch.no_grad():
        p = F.linear(states.float(), target.lm_head.weight).softmax(-1).flatten(0, 1)
    weight = torch.exp(-torch.arange(n) / 4.0)
    weight = (weight / weight.sum()).repeat(label.numel() // n) / (label.numel() // n)
    ce = F.cross_entropy(logits, label.flatten(), reduction="none")
    l1 = (logits.softmax(-1) - p).abs().sum(-1)
    agree = 1 - 0.5 * l1.detach()
    bce = F.binary_cross_entropy_with_logits(sure.float().flatten(), agree, reduction="none")
    parts = {"ce": (weight * ce).sum(), "l1": (weight * l1).sum(), "conf": (weight * bce).sum()}
    return 0.1 * parts["ce"] + 0.9 * parts["l1"] + parts["conf"], parts


def train_drafter(args, text, held_out, target, generations):
    model = Drafter()
    model.reset(data.generator(args.seed, "drafter"))
    run = Loop("drafter", model, args.work, args.drafter_steps, 1.5e-2, 3e-3, every=240.0)
    real = data.windows(text, range(0, len(text) - LENGTH + 1, LENGTH), LENGTH).to(torch.uint8)
    states, n_text = States(target, torch.cat([real, generations])), len(real)
    while not run.done():
        gen = data.generator(args.seed, "drafter", run.step)
        # quarters of windows, which are cheap; whole ones while the learning rate falls
        late = run.rate_falls()
        count, span = (4, LENGTH) if late else (16, LENGTH // 4)
        index = torch.cat([torch.randint(0, n_text, (count // 2,), generator=gen),
                           torch.randint(n_text, len(states.rows), (count // 2,), generator=gen)])
        start = 0 if late else span * int(torch.randint(0, LENGTH // span, (1,), generator=gen))
        tokens, taps, final = (x[:, start:start + span] for x in states.get(index))
        anchors = torch.randint(1, span - model.rows, (count, 80 if late else 32), generator=gen)
        loss, parts = draft_loss(model, target, tokens, taps, final, anchors, start)
        if run.update(loss, **{k: v.detach() for k, v in parts.items()}):
            probe = Drafter()
            probe.load_state_dict(run.mean)
            export.round_weights(probe)
            m = evaluate.measure(target, probe, held_out, prompts=10, quick=True)
            print("drafter: acceptance length %.3f, without the Markov head %.3f" % (
                m["markov"]["acceptance_length"], m["without_markov"]["acceptance_length"]),
                flush=True)
            if args.out:
                export.write(probe, DRAFTER_CONFIG, os.path.join(args.out, "drafter"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", required=True)
    parser.add_argument("--work", required=True, help="state of the run")
    parser.add_argument("--out", help="where the pair is written")
    parser.add_argument("--stage", choices=["target", "generate", "drafter"], default="drafter",
                        help="the last stage to run")
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target-steps", type=int, default=1800)
    parser.add_argument("--generations", type=int, default=512)
    parser.add_argument("--drafter-steps", type=int, default=3000)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.makedirs(args.work, exist_ok=True)
    text, held_out, _ = data.load(args.text)
    train_target(args, text, held_out)
    target = export.round_weights(load_mean(args.work, "target", Target()))
    if args.out:
        export.write(target, TARGET_CONFIG, os.path.join(args.out, "target"))
        with open(os.path.join(args.out, "prompts.txt"), "w") as f:
            f.writelines(data.escape(p) + "\n" for p in data.held_out_prompts(held_out))
    if args.stage == "target":
        return
    generations = generate(args, text, target)
    if args.stage == "drafter":
        train_drafter(args, text, held_out, target, generations)


if __name__ == "__main__":
    main()
