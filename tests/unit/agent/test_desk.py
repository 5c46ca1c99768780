from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_resil.agent import protocol as p
from slurm_resil.agent import slots
from slurm_resil.agent.desk import Desk


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
