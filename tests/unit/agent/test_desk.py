from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_resil.agent import protocol as p
from slurm_resil.agent import slots
from slurm_resil.agent.desk import Desk
from slurm_resil.cli.agent import BurstBuffer
from slurm_resil.core import paths
from slurm_resil.format.manifest import ShardManifest


class Ears:
    """A rank's connection that keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any], *, timeout_s: float = 0.0) -> None:
        self.heard.append(message)


def test_a_slot_that_cannot_be_given_names_the_directory_and_the_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "pins" / "0000000010"))

    desk = Desk(str(tmp_path), "llama", range(1), 2, None, tell=lambda _: None, later=lambda call: call())  # type: ignore[arg-type]
    rank = desk.ranks[0]
    rank.channel = ears = Ears()  # type: ignore[assignment]
    monkeypatch.setattr(slots.Slots, "lease", refuse)
    desk.hear(rank, p.Lease(iteration=20, wait_s=5.0), 0.0)
    (said,) = ears.heard
    assert said["t"] == "NoSlot"
    assert f"in {tmp_path} of run llama: Permission denied; make" in said["reason"]
    assert "0000000010" not in said["reason"]
    desk.close()


def test_shards_that_are_not_this_runs_are_passed_over_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()

    def publish(name: int, **changes: Any) -> Path:
        values = {"run_id": "llama", "job_id": 1, "attempt": 4, "iteration": name, "rank": 0, "world_size": 2}
        values |= {"node": "n", "slot": "0-0.h5", "generation": 1, "items": (), "values": {}} | changes
        path = Path(paths.manifest(str(tmp_path), name, 0))
        ShardManifest(**values).publish(str(path), sync=False)
        return path

    good, fewer = publish(10), publish(20, world_size=1)
    other, renamed = publish(30, run_id="bert"), publish(40, iteration=39)
    store = BurstBuffer(str(tmp_path))
    desk = Desk(str(tmp_path), "llama", range(1), 2, store, tell=lambda _: None, later=lambda call: call())
    assert desk.survey(2) == [(10, 0, 4)]
    words = {iteration: why for iteration, _, why in desk.passed_over}
    assert f"of 1{p.OTHER_WORLD}2" in words[20]
    # two runs in one job: neither keeps the other one from beginning
    assert p.OTHER_WORLD not in words[30]
    assert "of run bert, this is llama" in words[30]
    assert "renamed: it is of iteration 39" in words[40]
    assert [path.exists() for path in (good, fewer, other, renamed)] == [True, True, True, False]
    desk.close()
