"""How the launcher's steps end when not all goes well, on a real cluster: never later than they have to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resil.sandbox import Sandbox

pytestmark = pytest.mark.cluster

HERE = Path(__file__).resolve().parent
Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def slow_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("a C compiler and Slurm's header are needed (apt-get install gcc libslurm-dev)")
    plugin = tmp_path_factory.mktemp("spank") / "slow_start.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", plugin, HERE / "slow_start.c"], check=True)
    return plugin


@pytest.fixture(scope="module")
def sandbox(cluster_factory: Callable[..., Sandbox], slow_start: Path) -> Iterator[Sandbox]:
    extra = slow_start.with_name("extra.conf")
    extra.write_text("SlurmdDebug=debug\n")  # what a slurmstepd is asked
    made = cluster_factory(nodes=2, spank=(str(slow_start),), slurm_conf_extra=extra)
    yield made
    made.down()


@pytest.fixture
def run(sandbox: Sandbox) -> Run:
    """Run a case of steps_job.py in a job of two nodes; the job is over when this returns."""

    def case(name: str) -> dict[str, Any]:
        directory = sandbox.pfs / name
        directory.mkdir(mode=0o777)
        directory.chmod(0o777)
        # the mover's command line starts a program of this name and no other
        stand_in = directory / "steps_job.py"
        stand_in.write_text(f"#!{sys.executable}\n" + (HERE / "steps_job.py").read_text())
        stand_in.chmod(0o755)
        script = f"#!/bin/bash\nexport PYTHONPATH={HERE.parents[1]} PYTHONDONTWRITEBYTECODE=1\nexec {stand_in} {name}\n"
        argv = ["sbatch", "--wait", "-N2", "--ntasks-per-node=1", "--time=5", "--output=out.txt"]
        done = sandbox.run(argv, user="alice", cwd=directory, stdin=script, timeout_s=120, check=False)
        out = (directory / "out.txt").read_text()
        assert done.returncode == 0, done.stderr + out
        return dict(json.loads(next(line for line in out.splitlines() if line.startswith("{"))))

    return case


def test_a_step_that_starts_is_killed_although_slurm_holds_the_first_request_back(run: Run) -> None:
    # srun is interrupted after 20 s; the request that is held back comes after a minute
    found = run("slow")
    assert found["code"] == 137
    assert found["seconds"] < 12, found


def test_a_mover_that_is_killed_takes_the_others_along_without_the_wait_for_sigterm(run: Run) -> None:
    found = run("killed")
    assert found["code"] == 137
    assert found["seconds"] < 7, found  # KillWait is 8 s


def test_no_slurmstepd_is_asked_to_terminate(run: Run, sandbox: Sandbox) -> None:
    """It would wait for a minute, and its node be drained, when that comes at the moment in which the tasks end."""
    found = run("untold")  # a mover whose end the others do not hear of
    assert found["code"] == 137, found
    assert found["seconds"] < 12, found
    logs = "".join((sandbox.layout.log / f"slurmd-{node}.log").read_text() for node in sandbox.nodes)
    asked = [line for line in logs.splitlines() if f"StepId={found['job']}.0" in line]
    assert any("_handle_signal_container" in line and line.endswith("signal=9") for line in asked), asked
    assert not any("_handle_terminate" in line for line in asked), asked


def test_movers_that_end_with_a_code_are_given_the_time_to_do_so(run: Run) -> None:
    found = run("told")
    assert found["code"] == 65, found
    assert not any("Killed" in line for line in found["lines"])
