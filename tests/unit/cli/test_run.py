"""``run --local`` as a user sees it: what is said on the terminal, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import sys
import torch
import slurm_resil as sr

state = {"model": torch.nn.Linear(int(sys.argv[1]), 2)}
with sr.Checkpointer.from_env(state, every=2) as checkpointer:
    for number in range(checkpointer.restore(), 4):
        if "odd" in sys.argv and number == 3:
            state["odd"] = object()
        checkpointer.step(number + 1)
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "bb").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run(work: Path, *command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    own = {"SLURM_RESIL_BB_ROOT": str(work / "bb"), "SLURM_RESIL_PREFIX": str(work / "pfs")}
    argv = [sys.executable, "-m", "slurm_resil", "run", "--local", "--run-id", "r", "--", *command]
    return subprocess.run(
        argv, cwd=work, env={**os.environ, **own, **(env or {})}, capture_output=True, text=True, timeout=120
    )


def events(work: Path, name: str) -> list[dict[str, object]]:
    lines = (work / "pfs" / "r" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def test_a_command_that_does_not_exist_is_tried_once(work: Path) -> None:
    done = run(work, "/nope/command")
    assert done.returncode == 127
    assert done.stderr.count("/nope/command: no such command") == 1
    assert len(events(work, "cycle_start")) == 1


@pytest.mark.torch
def test_a_checkpoint_of_another_model_is_tried_once_and_told_once(work: Path) -> None:
    assert run(work, sys.executable, "train.py", "3").returncode == 0
    done = run(work, sys.executable, "train.py", "4")
    assert done.returncode == 65
    assert [event["attempt"] for event in events(work, "cycle_start")] == [0, 1]
    assert done.stderr.count("(2, 3) in the checkpoint, (2, 4) in the state") == 1  # by the rank
    (line,) = [line for line in done.stderr.splitlines() if "the ranks cannot start" in line]
    assert f"rank 0 on {os.uname().nodename}" in line and str(work / "pfs" / "r" / "events.jsonl") in line
    assert "(2, 4) in the state" in str(events(work, "restore_failed")[0]["why"])


@pytest.mark.torch
def test_a_damaged_manifest_is_named_with_its_new_place_and_what_is_used_instead(work: Path) -> None:
    # after a good end nothing stays in the burst buffer
    command = ("sh", "-c", f"{sys.executable} train.py 3; exit 9")
    assert run(work, *command).returncode == 9
    (manifest,) = work.glob("bb/job-*/manifests/0000000004-000000.json")
    manifest.write_text("torn {")
    done = run(work, *command)
    assert done.returncode == 9
    (line,) = [line for line in done.stderr.splitlines() if "is damaged" in line]
    (lost,) = manifest.parent.glob("lost/*-000000.json.*[0-9]")
    assert "rank 0, iteration 4" in line and str(manifest) in line and f"moved to {lost}" in line
    assert f"restored is iteration 4 from {work / 'pfs' / 'r'}" in line
    (event,) = events(work, "set_aside")
    assert str(lost) in str(event["words"])


@pytest.mark.torch
def test_a_save_that_failed_is_told_once(work: Path) -> None:
    done = run(work, sys.executable, "train.py", "3", "odd")
    assert done.returncode == 0
    assert done.stderr.count("object cannot be stored") == 1
    (line,) = [line for line in done.stderr.splitlines() if "the checkpoint of iteration 4 failed" in line]
    assert f"rank 0 on {os.uname().nodename} could not save" in line and "events.jsonl" in line
    assert "object cannot be stored" in str(events(work, "save_failed")[0]["why"])


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"SLURM_RESIL_EVRY": "10"}, "is SLURM_RESIL_EVERY meant?"),
        ({"SLURM_RESIL_ENGINE": "ctl"}, "'ctl' is no HOST:PORT"),
        ({"SLURM_RESIL_INTERVAL": "-5min"}, "'-5min' is not a duration"),
    ],
)
def test_variables_that_make_no_sense_start_nothing(work: Path, env: dict[str, str], said: str) -> None:
    done = run(work, "true", env=env)
    assert done.returncode == 78 and said in done.stderr and not (work / "pfs").exists()


@pytest.mark.torch
def test_a_complete_run_gives_the_burst_buffer_back(work: Path) -> None:
    for _ in range(2):  # the second one has nothing to do
        assert run(work, sys.executable, "train.py", "3").returncode == 0
        assert list((work / "bb").iterdir()) == []
