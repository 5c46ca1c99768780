from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resil.agent import decisions
from slurm_resil.agent.decisions import Decisions
from slurm_resil.agent.protocol import Decide


def decide(epoch: int, *, commit: bool, iteration: int = 9) -> Decide:
    return Decide(epoch=epoch, commit=commit, iteration=iteration, stop=False)


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_whoever_is_first_has_decided(tmp_path: Path, kind: str) -> None:
    old = Decisions(str(tmp_path) if kind == "file" else None)
    new = Decisions(str(tmp_path)) if kind == "file" else old
    assert new.record(decide(5, commit=False), attempt=0, cycle=0).commit is False
    assert old.record(decide(5, commit=True), attempt=0, cycle=0).commit is False
    assert old.record(decide(6, commit=True), attempt=0, cycle=0).commit is True
    assert new.record(decide(6, commit=False), attempt=0, cycle=0).commit is True
    found = new.read(6)
    assert found is not None
    assert found == (decide(6, commit=True), 0, 0)
    assert new.read(7) is None


def test_the_newest_commit_of_a_cycle(tmp_path: Path) -> None:
    log = Decisions(str(tmp_path))
    log.record(decide(1, commit=True, iteration=10), attempt=0, cycle=0)
    log.record(decide(2, commit=True, iteration=20), attempt=0, cycle=1)
    log.record(decide(3, commit=False, iteration=30), attempt=0, cycle=1)
    found = Decisions(str(tmp_path)).newest(attempt=0, cycle=1)
    assert found is not None
    assert found.iteration == 20
    assert log.newest(attempt=1, cycle=0) is None


def test_they_do_not_pile_up_and_no_half_ones_are_left(tmp_path: Path) -> None:
    log = Decisions(str(tmp_path))
    for epoch in range(1, decisions.KEEP + 30):
        log.record(decide(epoch, commit=True), attempt=0, cycle=0)
    names = sorted(path.name for path in (tmp_path / "decisions").iterdir())
    assert len(names) == decisions.KEEP
    assert all(name.endswith(".json") for name in names)
    assert log.read(decisions.KEEP + 29) is not None


def test_what_cannot_be_read_is_no_decision(tmp_path: Path) -> None:
    log = Decisions(str(tmp_path))
    log.record(decide(1, commit=True), attempt=0, cycle=0)
    (tmp_path / "decisions" / f"{1:016d}.json").write_text("{")
    assert log.read(1) is None
    assert log.newest(attempt=0, cycle=0) is None
