"""Rows R* of the cases from the field that the checkpoint's own part decides; each test names its row."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import ckptworld as w
import pytest
import torch
from torch import nn

from slurm_resil.catalog import LocalCatalog, RunCatalog
from slurm_resil.ckpt.snapshot import Arena
from slurm_resil.core import paths
from slurm_resil.core.errors import DataError, StateError
from slurm_resil.format.manifest import ShardManifest

pytestmark = pytest.mark.torch


def restore_newest(state, job: str, run: str) -> tuple[str, int]:
    """What a rank does, in small: local first, then drained; what is bad is put away and never tried again."""
    local, drained = LocalCatalog(job, run_id="r1"), RunCatalog(run)
    tried = []
    while True:
        candidates = sorted(local.sealed(), reverse=True)
        newest = drained.newest_restorable()
        if candidates and (newest is None or candidates[0] >= newest.iteration):
            source, iteration = "local", candidates[0]
        elif newest is not None:
            source, iteration = "drained", newest.iteration
        else:
            return "fresh", 0
        assert (source, iteration) not in tried, "tried twice"
        tried.append((source, iteration))
        try:
            if source == "local":
                w.load(job, state, iteration=iteration)
            else:
                w.load_drained(run, state, 0, 1, iteration=iteration)
            return source, iteration
        except DataError as error:
            (
                local.quarantine(iteration, 0, str(error))
                if source == "local"
                else drained.quarantine(iteration, str(error))
            )


@pytest.fixture
def saved(tmp_path):
    """Iterations 1 and 2 in slots, both drained."""
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    arena = Arena(job, 0, slots=3)
    states = {}
    for iteration in (1, 2):
        state = w.training(iteration, iteration)
        w.save(arena, job, state, index=iteration, iteration=iteration)
        w.drain(job, run, iteration=iteration)
        states[iteration] = w.bits(state)
    arena.close()
    return job, run, states


def flip_local(job: str, iteration: int) -> None:
    manifest = ShardManifest.load(paths.manifest(job, iteration, 0))
    w.flip(os.path.join(job, "slots", manifest.slot), manifest.items[3].offset)


def flip_drained(run: str, iteration: int) -> None:
    item = [item for item in w.drained_items(run, iteration) if item.offset is not None][5]
    w.flip(paths.drained(run, iteration), item.offset)


def test_r1_r2_a_flipped_bit_is_found_and_the_next_tier_taken(saved):
    job, run, states = saved
    other = w.training(9)
    assert restore_newest(other, job, run) == ("local", 2)
    assert w.bits(other) == states[2]
    damage = [lambda: flip_local(job, 2), lambda: flip_drained(run, 2), lambda: flip_local(job, 1)]
    for hit, expected in zip(damage, [("drained", 2), ("local", 1), ("drained", 1)], strict=True):
        hit()
        other = w.training(9, 1)
        assert restore_newest(other, job, run) == expected
        assert w.bits(other) == states[expected[1]]
    flip_drained(run, 1)
    other = w.training(9, 1)
    before = w.bits(other)
    assert restore_newest(other, job, run) == ("fresh", 0)
    assert w.bits(other) == before  # nothing of the damaged ones got in
    assert LocalCatalog(job).sealed() == {} and RunCatalog(run).durable() == []
    assert restore_newest(other, job, run) == ("fresh", 0)
    assert len([entry for entry in RunCatalog(run).explain() if "hash" in entry.why]) == 2


@pytest.mark.parametrize("drained", [False, True], ids=["local", "drained"])
def test_r3_another_precision_is_refused(tmp_path, drained):
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    w.save_new(job, {"m": nn.Linear(3, 3)})
    other = {"m": nn.Linear(3, 3).bfloat16()}
    before = w.bits(other)
    with pytest.raises(StateError, match=r"m/weight: torch.float32 in the checkpoint, torch.bfloat16 in the state"):
        if drained:
            w.drain(job, run)
            w.load_drained(run, other, 0, 1)
        else:
            w.load(job, other)
    assert w.bits(other) == before


@pytest.mark.parametrize("drained", [False, True], ids=["local", "drained"])
def test_r4_tied_weights_are_stored_once_and_restored_shared(tmp_path, drained):
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    state = w.training(1, 2)
    manifest = w.save_new(job, state)
    names = [item.name for item in manifest.items]
    assert "model/token.weight" in names and "model/head.weight" not in names
    assert sum("exp_avg_sq" in name for name in names) == len(list(state["model"].parameters()))
    other = w.training(2)
    if drained:
        w.drain(job, run)
        w.load_drained(run, other, 0, 1)
    else:
        w.load(job, other)
    assert other["model"].head.weight is other["model"].token.weight
    assert w.bits(other) == w.bits(state)


def test_r5_an_interrupted_save_is_ignored(saved):
    job, run, states = saved
    Path(paths.slot(job, 0, 0)).write_bytes(b"half of a save")
    Path(job, "manifests", ".0000000003-000000.json.77.tmp").write_bytes(b"{")
    Path(run, ".ckpt-3.h5.part").write_bytes(b"half of a drain")
    Path(paths.drained(run, 3)).write_bytes(b"renamed, but no manifest yet")
    other = w.training(9)
    assert restore_newest(other, job, run) == ("local", 2)
    assert w.bits(other) == states[2]
    shutil.rmtree(job)
    other = w.training(9)
    assert restore_newest(other, job, run) == ("drained", 2)
    assert w.bits(other) == states[2]


class Loader:
    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("world", [2, 8])
def test_r6_the_loaders_place_is_never_dropped_without_a_word(tmp_path, world):
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    for rank in range(4):
        w.save_new(job, {"loader": Loader(100 + rank)}, rank=rank, world_size=4)
    w.drain(job, run)
    for rank in range(world):
        loader = Loader(5)
        with pytest.raises(StateError, match=r"changed from 4, and this state is each rank's own: loader") as caught:
            w.load_drained(run, {"loader": loader}, rank, world)
        assert loader.position == 5
        assert "rank_mod" in caught.value.mend
        w.load_drained(run, {"loader": loader}, rank, world, private="rank_mod")
        assert loader.position == 100 + rank % 4


def test_r7_shards_are_found_by_what_they_are(tmp_path):
    """On a node that held other ranks before, and in another directory."""
    job = w.job(tmp_path)
    for rank in (0, 1):
        w.save_new(job, {"a": torch.full((3,), rank)}, rank=rank, world_size=2)
    moved = str(tmp_path / "job-8")
    shutil.copytree(job, moved)
    for rank in (1, 0):
        other = {"a": torch.zeros(3, dtype=torch.long)}
        w.load(moved, other, rank=rank)
        assert other["a"].tolist() == [rank] * 3
    with pytest.raises(DataError, match="swapped"):
        shutil.copy(paths.slot(moved, 0, 0), paths.slot(moved, 1, 0))
        w.load(moved, other, rank=1)


def test_r8_names_types_and_shapes_before_the_first_byte(tmp_path):
    """One wrong entry at the end of a large state: nothing of the rest is touched."""
    job = w.job(tmp_path)
    good = {f"t{n}": torch.full((4,), float(n)) for n in range(50)}
    w.save_new(job, good)
    for wrong in (torch.zeros(4).double(), torch.zeros(5), torch.zeros(2, 2), torch.zeros(4).long(), 3):
        other = {**{name: torch.zeros(4) for name in good}, "t49": wrong}
        with pytest.raises(StateError, match="t49"):
            w.load(job, other)
        assert all(not other[f"t{n}"].any() for n in range(49))
    missing = {name: torch.zeros(4) for name in list(good)[:-1]}
    with pytest.raises(StateError, match="t49: is in the checkpoint, not in the state"):
        w.load(job, missing)
    assert not any(tensor.any() for tensor in missing.values())
