"""Jobs that end with sealed checkpoints that nobody has drained: what they left on their nodes becomes durable."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import FAULT, Job, jobs, wait_for

from slurm_resil.core import paths
from slurm_resil.hooks.command import command
from slurm_resil.sandbox import Sandbox

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]
SCRIPT = """#!/bin/bash
export PYTHONPATH={fault}/movesite:{root} PYTHONDONTWRITEBYTECODE=1 PATH={bin}:$PATH OMP_NUM_THREADS=1
export SLURM_RESIL_BB_ROOT={bb} SLURM_RESIL_PREFIX={prefix} SLURM_RESIL_RUN_ID=run SLURM_RESIL_REDUNDANCY=single
{more}
python -m slurm_resil run {launcher} --every 10 -- python {train} --real {options}
"""
ITERATIONS = 120


class Site:
    """Two nodes with prolog and epilog; the epilog hands over."""

    def __init__(self, factory: Callable[..., Sandbox], work: Path) -> None:
        self.work, self.log = work, work / "hooks.log"
        where = work / "s"
        self._config = work / "hooks.json"
        self.bb_root = str(where / "bb")
        self.configure()
        hooks = {name: work / name for name in ("prolog", "epilog")}
        for name, path in hooks.items():
            path.write_text(f"#!/bin/sh\nexec {shlex.join(command(name, str(self._config)))}\n")
            path.chmod(0o755)
        self.sandbox = factory(dir=where, nodes=2, grace_time_s=10, **hooks)

    def configure(self, **config: object) -> None:
        about = {"bb_root": self.bb_root, "always": True, "late": True, "log": str(self.log), **config}
        self._config.write_text(json.dumps(about))

    def dir(self, node: str, job: int) -> Path:
        return self.sandbox.node_path(node, self.sandbox.bb / f"job-{job}")

    def notes(self, event: str, job: int) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [note for note in map(json.loads, lines) if (note["event"], note["job"]) == (event, job)]

    def said(self, job: int) -> str:
        """What the late drains of a job say, for a test that fails."""
        logs = [self.dir(node, job) / "late.log" for node in self.sandbox.nodes]
        return "\n".join(path.read_text() for path in logs if path.exists())


@pytest.fixture(scope="module")
def site(cluster_factory: Callable[..., Sandbox]) -> Iterator[Site]:
    pytest.importorskip("mpi4py")
    work = Path(tempfile.mkdtemp(prefix="srl-", dir="/tmp"))
    work.chmod(0o755)
    made = Site(cluster_factory, work)
    yield made
    made.sandbox.down()
    shutil.rmtree(work)


class Run:
    """A run of several jobs, of which the first ones come to no good end."""

    def __init__(self, site: Site, make: Callable[..., Job], more: str = "") -> None:
        self.site, self._make, self._more = site, make, more
        self.prefix = site.sandbox.pfs / f"prefix-{time.monotonic_ns()}"
        self.prefix.mkdir()
        self.prefix.chmod(0o777)
        self.dir = self.prefix / "run"

    def job(self, *options: str, time_min: int = 10) -> Job:
        script = SCRIPT.replace("{fault}", str(FAULT)).replace("{bb}", self.site.bb_root)
        script = script.replace("{prefix}", str(self.prefix)).replace("{more}", self._more)
        sbatch = ("-N2", "--ntasks-per-node=1", f"--time={time_min}", "--no-requeue")
        made = self._make("--iterations", str(ITERATIONS), *options, sbatch=sbatch, script=script)
        made.run_dir = self.dir
        return made

    def nothing_is_drained(self) -> None:
        """The launcher's own drains hang from now on; late ones do not hear of that."""
        self.dir.mkdir()
        self.dir.chmod(0o777)
        (self.dir / "fault-drain").write_text("drain.round:hang@*")

    def durable(self) -> list[int]:
        found = [paths.parse_drained(name) for name in os.listdir(self.dir)]
        return sorted(number for number in found if number is not None)

    def wait_durable(self, job: Job, iteration: int) -> int:
        """Wait until one that is no older is durable: ranks may have saved once more while the job was ended."""
        try:
            return max(
                wait_for(
                    f"iteration {iteration} durable", lambda: [one for one in self.durable() if one >= iteration], 60
                )
            )
        finally:
            print(self.site.said(job.id), job.events[-5:], self.site.log.read_text(), sep="\n")  # of use if it fails

    def goes_on_from(self, iteration: int) -> None:
        """Another job of the run restores it, and comes to the end that it would have without faults."""
        (self.dir / "fault-drain").unlink()
        job = self.job("--pace", "0.02")
        job.assert_complete(ITERATIONS, ranks=2)
        found = {rank: line["loaded"][-1] for rank, line in job.starts(job.events[-1]["attempt"]).items()}
        assert found == {rank: ["drained", iteration] for rank in range(2)}


def ended(job: Job, how: str) -> int:
    """Let a job end with nothing drained; returns the newest iteration that all of its ranks have sealed."""
    if how == "cancelled":
        job.wait_event("sealed", 2)
        job.sandbox.run(["scancel", str(job.id)], user="alice")
    job.wait_state("CANCELLED", "TIMEOUT", "FAILED", timeout_s=150)
    assert job.named("durable") == []
    return max(event["iteration"] for event in job.named("sealed"))


@pytest.mark.parametrize("how", ["cancelled", pytest.param("walltime", marks=pytest.mark.full)])
def test_the_epilogs_process_makes_it_durable_and_the_run_goes_on_from_it(site: Site, how: str) -> None:
    with jobs(site.sandbox) as make:
        run = Run(site, make)
        run.nothing_is_drained()
        job = run.job("--pace", "0.2" if how == "cancelled" else "1.5", time_min=10 if how == "cancelled" else 1)
        newest = ended(job, how)
        newest = run.wait_durable(job, newest)
        job.wait_event("late_published")
        assert {note["why"] for note in site.notes("handed_over", job.id)} == {"a sealed checkpoint is not durable"}
        wait_for("empty directories", lambda: not any(_inside(site, job)), 30)
        assert [event["iteration"] for event in job.named("late_published")] == [newest]  # once, by one of the two
        assert not (run.dir / "late").exists()
        run.goes_on_from(newest)


def test_a_job_on_the_same_nodes_makes_it_durable_and_the_run_goes_on_from_it(site: Site) -> None:
    """Where the epilog hands nothing over; the launcher is killed with the job, and releases nothing at the end."""
    site.configure(late=False)
    about = site.work / "site.toml"
    about.write_text('[drain]\nlate = "job"\n')
    with jobs(site.sandbox) as make:
        run = Run(site, make, f"export SLURM_RESIL_SITE={about}")
        run.nothing_is_drained()
        job = run.job("--pace", "0.2")
        late = job.wait_event("late_job")["late_job_id"]
        job.wait_event("sealed", 2)
        wait_for("its release", lambda: "(Dependency)" in queued(site.sandbox, late), 20)
        site.sandbox.run(["scancel", "--signal=KILL", "--full", str(job.id)], user="alice")
        job.wait_state("CANCELLED", "FAILED", timeout_s=60)
        newest = max(event["iteration"] for event in job.named("sealed"))
        newest = run.wait_durable(job, newest)
        wait_for("its end", lambda: not queued(site.sandbox, late), 60)
        wait_for("empty directories", lambda: not any(_inside(site, job)), 30)
        run.goes_on_from(newest)
        # nothing is left for that of the second job: it is cancelled, held as it was or not
        (second,) = [event["late_job_id"] for event in job.named("late_job") if event["late_job_id"] != late]
        wait_for("the other's end", lambda: not queued(site.sandbox, second), 20)
    site.configure()


def queued(sandbox: Sandbox, job: int) -> str:
    """What squeue says of why a job is not over; empty if it is."""
    return sandbox.run(["squeue", "-h", "-j", str(job), "-o", "%T %R"], check=False).stdout.strip()


def test_a_node_that_never_comes_back_is_named_and_the_others_keep_what_they_have(site: Site) -> None:
    site.configure(late_limit="8")
    gone = site.sandbox.nodes[1]
    with jobs(site.sandbox) as make:
        run = Run(site, make)
        run.nothing_is_drained()
        job = run.job("--pace", "0.2")
        job.wait_event("sealed", 2)
        site.sandbox.node_kill(gone)
        site.sandbox.node_wipe(gone)
        site.sandbox.run(["scontrol", "update", f"NodeName={gone}", "State=DOWN", "Reason=test"])
        job.wait_state("CANCELLED", "FAILED", "NODE_FAIL", timeout_s=60)
        failed = job.wait_event("late_failed")
        assert failed["node"] == site.sandbox.nodes[0]
        newest = max(event["iteration"] for event in job.named("sealed"))
        names = os.listdir(site.dir(site.sandbox.nodes[0], job.id) / "manifests")
        newest = max(newest, *(int(name.partition("-")[0]) for name in names))
        record = json.loads(Path(paths.dropped(str(run.dir), newest)).read_text())
        assert (record["kept"], record["node"]) == (True, site.sandbox.nodes[0])
        assert gone in record["why"]
        assert run.durable() == []
        assert (site.dir(site.sandbox.nodes[0], job.id) / "manifests").exists()
        shutil.rmtree(site.dir(site.sandbox.nodes[0], job.id))
    site.configure()


def _inside(site: Site, job: Job) -> list[str]:
    found = []
    for node in site.sandbox.nodes:
        where = site.dir(node, job.id)
        found += os.listdir(where) if where.exists() else []
    return found
