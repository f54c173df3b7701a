"""What both trainings share: optimisers, learning rate, checkpoints, progress.

A checkpoint holds everything the next step depends on. Random draws depend on the seed and the
step alone (data.generator), so a run that was interrupted ends with what an uninterrupted one
would have ended with.
"""
import os
import sys
import time

import torch


def save(path, value):
    """The old file stays until the new one is complete."""
    torch.save(value, path + ".new")
    os.replace(path + ".new", path)


class Loop:
    def __init__(self, name, model, work, steps, matrix_lr, other_lr, every=120.0):
        """Muon for matrices between hidden states, AdamW for tables, heads and vectors. every:
        seconds between two checkpoints."""
        self.name, self.model, self.steps, self.every = name, model, steps, every
        self.path = os.path.join(work, name + ".pt")
        inner = [p for n, p in model.named_parameters() if p.dim() == 2
                 and not any(word in n for word in ("embed", "lm_head", "markov", "confidence"))]
        chosen = set(map(id, inner))
        other = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
        self.optimisers = [
            (torch.optim.Muon(inner, lr=matrix_lr, weight_decay=0.05,
                              adjust_lr_fn="match_rms_adamw"), matrix_lr),
            (torch.optim.AdamW(other, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0), other_lr)]
        self.mean = {k: v.clone() for k, v in model.state_dict().items()}
        self.step, self.seconds, self.logged = 0, 0.0, {}
        self.saved = self.started = time.time()
        if os.path.exists(self.path):
            state = torch.load(self.path, weights_only=True)
            self.model.load_state_dict(state["model"])
            for (o, _), s in zip(self.optimisers, state["optimisers"]):
                o.load_state_dict(s)
            self.mean, self.step, self.seconds = state["mean"], state["step"], state["seconds"]
            print("%s: continued at step %d of %d" % (name, self.step, steps), flush=True)

    def rate(self):
        """Warm-up, a constant part, and a linear end over the last fifth."""
        return min(1.0, (self.step + 1) / 50, max(0.0, (self.steps - self.step) / self.steps * 5))

    def rate_falls(self):
        return self.step >= self.steps * 4 // 5

    def update(self, loss, /, **values):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for o, lr in self.optimisers:
            for group in o.param_groups:
                group["lr"] = lr * self.rate()
            o.step()
            o.zero_grad(set_to_none=True)
        # running mean of the weights: what is measured and exported
        keep = min(0.99, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for k, v in self.model.state_dict().items():
                self.mean[k].lerp_(v, 1 - keep)
        self.step += 1
        for k, v in values.items():
            self.logged.setdefault(k, []).append(float(v))
        if self.step % 25 == 0 or self.step == self.steps:
            done = self.seconds + time.time() - self.started
            print("%s %5d/%d  %s  lr x%.2f  %.0f s" % (
                self.name, self.step, self.steps,
                "  ".join("%s %.4f" % (k, sum(v) / len(v)) for k, v in self.logged.items()),
                self.rate(), done), flush=True)
            self.logged = {}
        if self.step == self.steps or time.time() - self.saved > self.every:
            self.write()
            return True
        return False

    def write(self):
        now = time.time()
        self.seconds += now - self.started
        self.started = self.saved = now
        save(self.path, {"model": self.model.state_dict(), "mean": self.mean, "step": self.step,
                         "optimisers": [o.state_dict() for o, _ in self.optimisers],
                         "seconds": self.seconds})

    def done(self):
        return self.step >= self.steps


def load_mean(work, name, model):
    path = os.path.join(work, name + ".pt")
    if not os.path.exists(path):
        sys.exit("%s is missing: run the stage %s first" % (path, name))
    model.load_state_dict(torch.load(path, weights_only=True)["mean"])
    return model
