"""What every training shares: a norm, RoPE, the schedule, and a loop with a log and a checkpoint to resume from.

Shapes: B rows, T tokens, K head_dim, V vocab_size.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specdec.config import Config


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_table(config: Config) -> Tensor:
    """cos and sin of pos / theta^(2i/K): (2, seq_len, K/2)."""
    freqs = config.rope.theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angles = torch.arange(config.seq_len, dtype=torch.float64)[:, None] * freqs
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate adjacent pairs (2i, 2i+1) of x (B, T, heads, K) by rope (2, T, K/2)."""
    cos, sin = rope[:, :, None, :]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)


def bf16() -> torch.autocast:
    """bf16 products, fp32 sums of the residual stream: 4 times fp32's speed where the CPU has avx512_bf16."""
    return torch.autocast("cpu", torch.bfloat16)


def as_batch(rows: np.ndarray) -> Tensor:
    return torch.from_numpy(rows.astype(np.int64))


def learning_rate(step: int, peak: float, warmup: int, steps: int, decay_steps: int) -> float:
    """Warmup, stable, then a linear decay to zero over the last decay_steps."""
    return peak * min(1.0, (step + 1) / warmup, max(0.0, (steps - step) / decay_steps))


class Trainer:
    """AdamW, the schedule, the log and a checkpoint to resume from: what all trainings share. exported: what the library reads.

    model: a module with a config, a text of whose is seq_len tokens, and `export`.
    """

    def __init__(self, model: Any, name: str, args: argparse.Namespace, exported: Path) -> None:
        self.model, self.name, self.args, self.exported = model, name, args, exported
        norms = [p for name, p in model.named_parameters() if "rms" in name or "norm" in name]
        matrices = [p for name, p in model.named_parameters() if not ("rms" in name or "norm" in name)]
        groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": norms, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
        self.step, self.cpu_before = 0, 0.0
        self.path = args.out / f"{name}.pt"
        if self.path.exists():
            state = torch.load(self.path)
            model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.cpu_before = state["step"], state["cpu_seconds"]
        torch.manual_seed(args.seed + self.step)
        n = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name}: {n:,} parameters, step {self.step} of {args.steps}", flush=True)

    def train(
        self,
        data: Iterator[Any],
        losses: Callable[[Any], tuple[Tensor, dict[str, Tensor]]],
        dev_losses: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """Up to args.steps. losses: of a batch, what goes down, and figures, whose means are logged with the dev_losses."""
        args, config = self.args, self.model.config
        running: list[list[float]] = []
        for batch in data:
            if self.step >= args.steps:
                break
            with bf16():
                loss, figures = losses(batch)
            self.update(loss)
            running.append([value.item() for value in figures.values()])
            if self.step % args.log_every == 0 or self.step == args.steps:
                means = dict(zip(figures, np.mean(running, 0).tolist(), strict=True))
                self.log(**means, **dev_losses(), tokens=self.step * args.batch * config.seq_len)
                running.clear()
                self.save()

    def update(self, loss: Tensor) -> None:
        args = self.args
        lr = learning_rate(self.step, args.lr, args.warmup, args.steps, args.decay_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def cpu_seconds(self) -> float:
        return self.cpu_before + time.process_time()

    def log(self, **values: float) -> None:
        record = {"step": self.step, "cpu_seconds": round(self.cpu_seconds()), **values}
        record = {k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}
        print(json.dumps(record), flush=True)
        with (self.args.out / f"{self.name}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "cpu_seconds": self.cpu_seconds(),
        }
        part = self.path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.path)
        self.model.export(self.exported)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Between probabilities (..., V): what rejection sampling rejects."""
    return 0.5 * (p - q).abs().sum(-1)
