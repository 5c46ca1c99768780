"""The job that drains what another one leaves: what Slurm is asked for, and what happens if it refuses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurm_resil.core.latecall import command
from slurm_resil.launch.latejob import LateJob


class Slurm:
    """Commands that write down how they were called."""

    def __init__(self, root: Path) -> None:
        self.root, self.told = root, []
        self.run_dir = root / "a run"
        self.run_dir.mkdir()
        self.answer("sbatch", 'cp "${@: -1}" "$HOME/script"; echo "77;cluster"')
        for name in ("scontrol", "scancel"):
            self.answer(name, "")

    def answer(self, name: str, body: str) -> None:
        path = self.root / name
        path.write_text(f'#!/bin/bash\nprintf "%s\\n" "{name} $*" >> "$HOME/calls"\nenv > "$HOME/env"\n{body}\n')
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def job(self, **env: str) -> LateJob:
        mine = {
            "PATH": f"{self.root}:/usr/bin:/bin",
            "HOME": str(self.root),
            "SLURM_NTASKS": "64",
            "SECRET": "x",
            **env,
        }

        def tell(event: str, **fields: Any) -> None:
            self.told.append((event, fields))

        nodes = ("n1", "n2", "n10")
        return LateJob(12, nodes, "/bb/job-12", str(self.run_dir), limit_s=3600.0, env=mine, tell=tell)


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def test_it_is_held_depends_on_the_job_and_gets_its_nodes(slurm: Slurm) -> None:
    late = slurm.job(SLURM_JOB_PARTITION="gpu", SLURM_JOB_ACCOUNT="lab", SLURM_JOB_QOS="normal")
    late.submit()
    assert slurm.told == [("late_job", {"late_job_id": 77})]
    (call,) = slurm.calls
    for option in (
        "--hold",
        "--dependency=afterany:12",
        "--nodelist=n[1-2,10]",
        "--nodes=3",
        "--ntasks=3",
        "--time=62",
    ):
        assert f" {option} " in call
    for option in ("--partition=gpu", "--account=lab", "--qos=normal", "--no-requeue"):
        assert f" {option} " in call
    env = (slurm.root / "env").read_text()
    assert "SECRET" not in env
    assert "SLURM_NTASKS" not in env
    script = (slurm.root / "script").read_text()
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "--mpi=none" in script
    assert "--no-kill" in script
    for word in command("/bb/job-12", 3600)[-6:]:
        assert word in script
    assert [name for name in os.listdir(slurm.run_dir) if name.endswith(".sh")] == []


def test_it_is_released_once_and_cancelled_by_number_and_name(slurm: Slurm) -> None:
    late = slurm.job()
    late.submit()
    late.needed()
    late.needed()
    assert late.released
    late.not_needed()
    late.not_needed()
    late.needed()
    assert slurm.calls[1:] == ["scontrol release 77", "scancel --quiet --name=resil-late-12 77"]
    assert os.listdir(slurm.run_dir) == []


def test_the_next_attempt_cancels_that_of_the_one_before_and_no_other_jobs(slurm: Slurm) -> None:
    slurm.job().submit()
    slurm.job().submit()
    assert "scancel --quiet --name=resil-late-12 77" in slurm.calls
    (slurm.root / "calls").unlink()
    (slurm.run_dir / "late-job.json").write_text(json.dumps({"job_id": 11, "late_job_id": 70}))
    slurm.job().submit()
    assert not any(call.startswith("scancel") for call in slurm.calls)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1', "QOSMaxSubmitJobPerUserLimit"),
        ("echo nothing", "sbatch said 'nothing'"),
    ],
)
def test_a_job_that_slurm_refuses_is_told_and_nothing_else_fails(slurm: Slurm, body: str, words: str) -> None:
    slurm.answer("sbatch", body)
    late = slurm.job()
    late.submit()
    ((event, fields),) = slurm.told
    assert event == "warning"
    assert words in fields["words"]
    late.needed()
    late.not_needed()
    assert len(slurm.calls) == 1


def test_a_release_that_fails_is_told_and_tried_again(slurm: Slurm) -> None:
    late = slurm.job()
    late.submit()
    slurm.answer("scontrol", 'echo "slurm_update error: Unable to contact slurm controller" >&2; exit 1')
    late.needed()
    assert not late.released
    assert slurm.told[-1][0] == "warning"
    slurm.answer("scontrol", "")
    late.needed()
    assert late.released
