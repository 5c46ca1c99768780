"""State of single ranks when their number changes."""

from __future__ import annotations

import ckptworld as w
import pytest
import torch
from torch import nn

from slurm_resil.core.errors import StateError

pytestmark = pytest.mark.torch


class Loader:
    def __init__(self, rank: int) -> None:
        self.place = {"position": rank * 10, "order": torch.arange(3) + rank}

    def state_dict(self):
        return self.place

    def load_state_dict(self, state):
        self.place = state


def rank_state(rank: int) -> dict:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        model[1].running_mean.fill_(rank)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": Loader(rank),
        "generator": torch.Generator().manual_seed(rank),
        "config": {"width": 3, "rank": rank, "host": (rank, "x")},
    }


@pytest.fixture
def run_dir(tmp_path):
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    for rank in range(4):
        w.save_new(job, rank_state(rank), rank=rank, world_size=4)
    w.drain(job, run)
    return run


def test_the_same_number_of_ranks_gets_its_own(run_dir):
    for rank in range(4):
        state = rank_state(17)
        w.load_drained(run_dir, state, rank, 4)
        assert w.bits(state) == w.bits(rank_state(rank))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_another_number_is_refused_and_says_what_is_private(run_dir, world):
    state = rank_state(17)
    before = w.bits(state)
    with pytest.raises(StateError, match="the number of ranks has changed from 4") as caught:
        w.load_drained(run_dir, state, 0, world)
    for name in ("model/1.running_mean", "loader", "generator", "config/rank", "config/host"):
        assert name in str(caught.value)
    assert "config/width" not in str(caught.value)
    assert w.bits(state) == before


def test_fresh_leaves_private_state_alone(run_dir):
    state = rank_state(17)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()
    report = w.load_drained(run_dir, state, 0, 2, private="fresh").report
    assert {"loader", "generator", "config/rank", "config/host/0", "model/1.running_mean"} <= set(report.kept)
    assert not (report.skipped or report.missing or report.unexpected)
    assert w.bits(state) == w.bits(rank_state(17))  # parameters are shared and came back, the rest is as it was


def test_rank_mod_hands_it_on(run_dir):
    for rank in range(8):
        state = rank_state(17)
        w.load_drained(run_dir, state, rank, 8, private="rank_mod")
        assert w.bits(state) == w.bits(rank_state(rank % 4))


def test_nothing_private_needs_no_policy(tmp_path):
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    for rank in range(3):
        w.save_new(job, rank_state(5), rank=rank, world_size=3)
    w.drain(job, run)
    state = rank_state(17)
    w.load_drained(run, state, 1, 2)
    assert w.bits(state) == w.bits(rank_state(5))
