"""Helpers: save a state into a slot, seal it, restore it; compare states bit for bit without the code under test."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.memo import Memo
from slurm_resil.ckpt.restore import Restored, restore_drained, restore_local, restore_shards
from slurm_resil.ckpt.seal import seal
from slurm_resil.ckpt.snapshot import Arena
from slurm_resil.comm import local
from slurm_resil.core import paths
from slurm_resil.core.model import RunInfo
from slurm_resil.drain import collective
from slurm_resil.drain.skeleton import skeleton
from slurm_resil.format import draft
from slurm_resil.format.manifest import DrainedManifest, ShardManifest


def run_info(**changes: Any) -> RunInfo:
    return RunInfo(**{"run_id": "r1", "job_id": 7, "attempt": 0, "cycle": 0, "world_size": 1, "nodes": 1, **changes})


def job(tmp_path: Path) -> str:
    path = tmp_path / "bb" / "job-7"
    path.parent.mkdir(exist_ok=True)
    return os.fspath(path)


def save(
    arena: Arena, job_dir: str, state: Mapping[str, object], *, index: int = 0, iteration: int = 1, **changes: Any
) -> ShardManifest:
    """As rank and agent do it between them, in a run that has saved before."""
    memo = Memo()
    flatten(state, memo)
    flat = flatten(state, memo)
    written = arena.write(index, flat, iteration=iteration, run=run_info(**changes), node="n0")
    heard = draft.read(job_dir, arena.draft(written, flat), "the draft")
    return seal(job_dir, draft.Descriptions(job_dir).complete(heard))


def save_new(job_dir: str, state: Mapping[str, object], *, rank: int = 0, **more: Any) -> ShardManifest:
    arena = Arena(job_dir, rank, slots=2)
    try:
        return save(arena, job_dir, state, **more)
    finally:
        arena.close()


def load(job_dir: str, state: Mapping[str, object], *, iteration: int = 1, rank: int = 0, **more: Any) -> Restored:
    return restore_local(state, job_dir, ShardManifest.load(paths.manifest(job_dir, iteration, rank)), **more)


def drain(job_dir: str, run_dir: str, *, iteration: int = 1) -> DrainedManifest:
    """Drain with the real drain, one mover, all ranks' shards in one directory."""
    os.makedirs(run_dir, exist_ok=True)

    def one(comm: Any) -> Any:
        return collective.drain(comm, run_dir=run_dir, job_dir=job_dir, iteration=iteration, skeleton=skeleton)

    return local.run(1, one)[0].manifest


def load_drained(run_dir: str, state: Mapping[str, object], rank: int, world: int, **more: Any) -> Restored:
    manifest = DrainedManifest.load(paths.drained_manifest(run_dir, more.pop("iteration", 1)))
    return restore_drained(state, run_dir, manifest, rank, world, **more)


def shards(job_dir: str, iteration: int = 1) -> list[ShardManifest]:
    """Manifests of all ranks."""
    found = [paths.parse_manifest(name) for name in os.listdir(os.path.join(job_dir, "manifests"))]
    ranks = sorted(parsed[1] for parsed in found if parsed is not None and parsed[0] == iteration)
    return [ShardManifest.load(paths.manifest(job_dir, iteration, rank)) for rank in ranks]


def load_shards(job_dir: str, state: Mapping[str, object], rank: int, world: int, **more: Any) -> Restored:
    return restore_shards(state, job_dir, shards(job_dir, more.pop("iteration", 1)), rank, world, **more)


def drained_items(run_dir: str, iteration: int = 1) -> tuple[Any, ...]:
    return DrainedManifest.load(paths.drained_manifest(run_dir, iteration)).items


def flip(path: str, at: int) -> None:
    """Flip one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


class Net(nn.Module):
    """Tied weights, running statistics, a counter, an unaligned odd shape."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.token = nn.Embedding(17, width)
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.middle(self.norm(self.token(x)))))


def training(seed: int, steps: int = 0, width: int = 8) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    generator = torch.Generator().manual_seed(seed)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "generator": generator,
        "numpy": np.random.default_rng(seed),
        "python": random.Random(seed),
        "position": seed,
    }
    train(state, steps)
    return state


def train(state: Mapping[str, Any], steps: int) -> None:
    for _ in range(steps):
        x = torch.randint(17, (16,), generator=state["generator"])
        loss = nn.functional.cross_entropy(state["model"](x), x.roll(1))
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["schedule"].step()


def bits(value: Any) -> Any:
    """Everything in a state as comparable plain values; floats and tensors by their bytes."""
    if isinstance(value, torch.Generator):
        return ("generator", bits(value.get_state()))
    if isinstance(value, np.random.Generator):
        return ("numpy", bits(value.bit_generator.state))
    if isinstance(value, random.Random):
        return ("random", value.getstate())
    if hasattr(value, "to_local"):
        return (tuple(value.shape), str(value.placements), bits(value.to_local()))
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        data = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
        return (str(value.dtype), tuple(value.shape), data)
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if hasattr(value, "state_dict"):
        return bits(value.state_dict())
    if isinstance(value, Mapping):
        return (type(value).__name__, [(key, bits(entry)) for key, entry in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [bits(entry) for entry in value])
    return (type(value).__name__, repr(value))


def scramble(state: Mapping[str, Any]) -> None:
    """Overwrite every tensor of a model and its optimizer."""
    with torch.no_grad():
        for tensor in [*state["model"].parameters(), *state["model"].buffers()]:
            tensor.fill_(3)
        for entry in state["optimizer"].state.values():
            for tensor in entry.values():
                tensor.fill_(5)
