"""The SPANK plugin's options, prolog and epilog in jobs of ordinary users on a real cluster, seen from outside."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import story

from slurm_resil.hooks.command import command
from slurm_resil.recovery.actions import SETTLE_S
from slurm_resil.sandbox import Sandbox

pytestmark = pytest.mark.cluster
SAY = "env | grep ^SLURM_RESIL | grep -v ^SLURM_RESIL_SANDBOX_OF"
ROOT = Path(__file__).resolve().parents[2]
ALICE, BOB = 20001, 20002


class Site:
    """A sandbox of two nodes with plugin and hooks."""

    def __init__(self, sandbox: Sandbox, log: Path) -> None:
        self.sandbox, self.log = sandbox, log

    def dir(self, node: str, job: int) -> Path:
        return self.sandbox.node_path(node, self.sandbox.bb / f"job-{job}")

    def notes(self, event: str) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [note for note in map(json.loads, lines) if note["event"] == event]

    def sbatch(
        self, script: str, *options: str, user: str = "alice", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        argv = ["sbatch", "--parsable", "--wait", "-N2", "--output=%j.out", *options]
        text = f"#!/bin/bash\n{script}\n"
        return self.sandbox.run(argv, user=user, stdin=text, cwd=self.home(user), check=check)

    def job(self, script: str, *options: str, user: str = "alice") -> tuple[int, str]:
        """Submit, wait for the end and for the epilogs; returns the job's id and what it said."""
        done = self.sbatch(script, *options, user=user)
        number = int(done.stdout.split(";")[0])
        self.wait_over(number)
        return number, (self.home(user) / f"{number}.out").read_text()

    def home(self, user: str) -> Path:
        path = self.sandbox.pfs / user
        if not path.exists():
            path.mkdir()
            shutil.chown(path, ALICE if user == "alice" else BOB)
        return path

    def wait_over(self, job: int) -> None:
        """Until no node is completing: the epilogs are over."""
        deadline = time.monotonic() + 30
        while "completing" in (said := self.sandbox.run(["squeue", "-h", "-o", "%i %T"]).stdout.lower()) or any(
            line.split()[0] == str(job) for line in said.splitlines()
        ):
            assert time.monotonic() < deadline, said
            time.sleep(0.2)

    def next_id(self) -> int:
        """The id that the next job gets."""
        job, _ = self.job("true", "-N1")
        return job + 1

    def assert_idle(self) -> None:
        """No hook has failed: Slurm would have drained the node."""
        assert set(self.sandbox.node_states().values()) == {"idle"}, self.sandbox.node_states()


@pytest.fixture(scope="module")
def site(cluster_factory: Callable[..., Sandbox]) -> Iterator[Site]:
    work = Path(tempfile.mkdtemp(prefix="srh-", dir="/tmp"))
    work.chmod(0o755)
    where = work / "s"
    config = work / "hooks.json"
    config.write_text(json.dumps({"bb_root": str(where / "bb"), "log": str(work / "hooks.log")}))
    hooks = {name: work / name for name in ("prolog", "epilog")}
    for name, path in hooks.items():
        path.write_text(f"#!/bin/sh\nexec {shlex.join(command(name, str(config)))}\n")
        path.chmod(0o755)
    extra = work / "extra.conf"
    extra.write_text((ROOT / "site_configs" / "slurm.conf").read_text().replace("Prolog=", "#").replace("Epilog=", "#"))
    made = cluster_factory(dir=where, nodes=2, slurm_conf_extra=extra, spank=(str(story.build_spank()),), **hooks)
    yield Site(made, work / "hooks.log")
    made.down()
    shutil.rmtree(work)


@pytest.fixture(scope="module")
def bare(cluster_factory: Callable[..., Sandbox]) -> Iterator[Sandbox]:
    made = cluster_factory(nodes=1)
    yield made
    made.down()


def test_the_directory_is_there_on_all_nodes_for_the_jobs_user_alone(site: Site) -> None:
    bb = site.sandbox.bb
    say = f"srun --ntasks-per-node=1 stat -c '%n %U %u %a' {bb}/job-$SLURM_JOB_ID"
    job, out = site.job(f"{say}\nsrun -N2 touch {bb}/job-$SLURM_JOB_ID/x", "--resil")
    assert sorted(out.splitlines()) == [f"{bb}/job-{job} alice {ALICE} 700"] * 2
    assert not any(site.dir(node, job).exists() for node in site.sandbox.nodes)  # nothing is sealed: nothing is kept
    site.assert_idle()


def test_the_directory_is_there_before_the_first_step_with_the_sites_prolog_flags(site: Site) -> None:
    argv = ["sbatch", "--parsable", "-N2", "--resil", "--output=/dev/null", "--wrap=sleep 60"]
    job = int(site.sandbox.run(argv, user="alice").stdout)
    deadline = time.monotonic() + 30
    while not all(site.dir(node, job).exists() for node in site.sandbox.nodes):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    site.sandbox.run(["scancel", str(job)], user="alice")
    site.wait_over(job)
    assert not any(site.dir(node, job).exists() for node in site.sandbox.nodes)


def test_doctor_finds_slurm_and_the_plugin(site: Site) -> None:
    names = ("slurm", "slurmctld", "requeue", "spank", "munge", "burst_buffer")
    argv = [sys.executable, "-m", "slurm_resil", "doctor", "--json", *(f"--only={name}" for name in names)]
    done = site.sandbox.run(argv, user="alice", env={"PYTHONPATH": str(ROOT)}, check=False)
    found = {entry["check"]: entry for entry in json.loads(done.stdout)["checks"]}
    assert {name: entry["result"] for name, entry in found.items()} == dict.fromkeys(names, "ok"), found
    assert done.returncode == 0


def test_options_become_the_environment_of_script_and_tasks(site: Site) -> None:
    options = ("--resil", "--resil-prefix=/scratch/a b", "--resil-every=500", "--resil-interval=10min")
    options += ("--resil-lead=90s", "--resil-run-id=llama-3", "--resil-redundancy=xor, rs:2 every 10,drain/20")
    _, out = site.job(f"{SAY}\nsrun -n1 -N1 bash -c '{SAY}'", *options)
    expected = {
        "SLURM_RESIL=1",
        "SLURM_RESIL_PREFIX=/scratch/a b",
        "SLURM_RESIL_EVERY=500",
        "SLURM_RESIL_INTERVAL=10min",
        "SLURM_RESIL_LEAD=90s",
        "SLURM_RESIL_RUN_ID=llama-3",
        "SLURM_RESIL_REDUNDANCY=xor, rs:2 every 10,drain/20",
    }
    lines = out.splitlines()
    assert len(lines) == 14
    assert (set(lines[:7]), set(lines[7:])) == (expected, expected)


@pytest.mark.parametrize("options", [(), ("--resil=off",), ("--resil=off", "--resil-every=5")])
def test_without_the_option_there_is_nothing(site: Site, options: tuple[str, ...]) -> None:
    job, out = site.job(f"ls {site.sandbox.bb}; {SAY} || true", *options)
    assert out == ""
    assert not any(site.dir(node, job).exists() for node in site.sandbox.nodes)


def test_off_counts_against_what_the_environment_brings_along(site: Site) -> None:
    """As for a job that is submitted from inside another one."""
    brought = "--export=ALL,SLURM_RESIL=1,SLURM_RESIL_EVERY=7"
    _, out = site.job(SAY, brought)
    assert out.splitlines() == ["SLURM_RESIL=1", "SLURM_RESIL_EVERY=7"]
    _, out = site.job(f"{SAY} || true", brought, "--resil=off")
    assert out == ""


def test_another_option_implies_the_feature(site: Site) -> None:
    _, out = site.job("ls -d $BB/job-$SLURM_JOB_ID", "--resil-every=5", f"--export=BB={site.sandbox.bb}")
    assert "/job-" in out


@pytest.mark.parametrize(
    ("option", "example"),
    [
        ("--resil=maybe", "--resil=off"),
        ("--resil-every=0", "--resil-every=500"),
        ("--resil-every=5x", "--resil-every=500"),
        ("--resil-interval=10", "--resil-interval=10min"),
        ("--resil-interval=0s", "--resil-interval=10min"),
        ("--resil-interval=367d", "--resil-interval=10min"),
        ("--resil-lead=soon", "--resil-lead=90s"),
        ("--resil-prefix=runs", "--resil-prefix=/scratch"),
        ("--resil-run-id=../up", "--resil-run-id=llama-3"),
        ("--resil-redundancy=raid", "--resil-redundancy=xor,rs:2/10"),
        ("--resil-redundancy=xor,rs:2/0", "--resil-redundancy=xor,rs:2/10"),
    ],
)
def test_a_bad_value_is_refused_before_there_is_a_job(site: Site, option: str, example: str) -> None:
    before = site.sandbox.run(["squeue", "-h", "-t", "all"]).stdout
    refused = [site.sbatch("true", option, check=False)]
    refused.append(site.sandbox.run(["srun", "-N1", option, "true"], user="alice", check=False))
    for done in refused:
        assert done.returncode != 0
        assert example in done.stderr
        assert option.partition("=")[2] in done.stderr
    assert site.sandbox.run(["squeue", "-h", "-t", "all"]).stdout == before
    site.assert_idle()


SEAL = """
cd {bb}/job-$SLURM_JOB_ID
srun --ntasks-per-node=1 bash -c 'mkdir manifests durable slots
echo x > slots/0-0.h5
for i in {sealed}; do echo {{}} > manifests/$i-000000.json; done
for i in {durable}; do echo {{}} > durable/$i.json; done'
"""


def test_the_epilog_removes_what_is_durable_and_keeps_what_is_not(site: Site) -> None:
    old, new = "0000000005", "0000000009"
    done, _ = site.job(SEAL.format(bb=site.sandbox.bb, sealed=f"{old} {new}", durable=new), "--resil")
    open_, _ = site.job(SEAL.format(bb=site.sandbox.bb, sealed=f"{old} {new}", durable=old), "--resil")
    for node in site.sandbox.nodes:
        assert not site.dir(node, done).exists()
        kept = site.dir(node, open_)
        assert kept.stat().st_uid == ALICE
        assert (kept / "slots" / "0-0.h5").read_text() == "x\n"
        shutil.rmtree(kept)
    notes = [note for note in site.notes("kept") if note["job"] == open_]
    assert [note["why"] for note in notes] == ["a sealed checkpoint is not durable"] * 2
    site.assert_idle()


def test_a_requeue_finds_what_it_has_left(site: Site) -> None:
    bb = site.sandbox.bb
    script = f"""cd {bb}/job-$SLURM_JOB_ID
if [[ ! $SLURM_RESTART_COUNT ]]; then
    srun --ntasks-per-node=1 bash -c 'echo {{}} > continue.json; echo saved > note'
    scontrol requeuehold $SLURM_JOB_ID
    sleep 60
fi
srun --ntasks-per-node=1 bash -c 'cat note; rm continue.json'"""
    argv = ["sbatch", "--parsable", "-N2", "--resil", "--requeue", "--output=%j.out", "--open-mode=append"]
    done = site.sandbox.run(argv, user="alice", stdin=f"#!/bin/bash\n{script}\n", cwd=site.home("alice"))
    job = int(done.stdout)
    deadline = time.monotonic() + 40
    while not {"JobState=PENDING", "Restarts=1"} <= set(
        (said := site.sandbox.run(["scontrol", "-o", "show", "job", str(job)]).stdout).split()
    ):
        assert time.monotonic() < deadline, said
        time.sleep(0.3)
    time.sleep(SETTLE_S)  # within the second of the kill slurmd takes it for what was killed, and fails it
    site.sandbox.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    site.sandbox.run(["scontrol", "release", str(job)])
    site.wait_over(job)
    assert (site.home("alice") / f"{job}.out").read_text().count("saved") == 2
    assert not any(site.dir(node, job).exists() for node in site.sandbox.nodes)


def test_what_another_user_left_under_the_same_id_is_set_aside_and_kept(site: Site) -> None:
    expected = site.next_id()
    for node in site.sandbox.nodes:
        left = site.dir(node, expected)
        left.mkdir(mode=0o700)
        (left / "theirs").write_text("bob's")
        os.chown(left, BOB, BOB)
    job, out = site.job(f"srun --ntasks-per-node=1 ls -A {site.sandbox.bb}/job-$SLURM_JOB_ID", "--resil")
    assert (job, out) == (expected, "")
    for node in site.sandbox.nodes:
        (aside,) = site.dir(node, expected).parent.glob(f"job-{job}.of-{BOB}.*")
        assert (aside.stat().st_uid, stat.S_IMODE(aside.stat().st_mode)) == (BOB, 0o700)
        assert (aside / "theirs").read_text() == "bob's"
        shutil.rmtree(aside)
    assert len([note for note in site.notes("set_aside") if note["job"] == job]) == 2
    site.assert_idle()


def test_a_directory_of_another_user_is_nobodys_to_remove(site: Site) -> None:
    expected = site.next_id()
    left = site.dir(site.sandbox.nodes[0], expected)
    left.mkdir(mode=0o700)
    os.chown(left, BOB, BOB)
    job, _ = site.job("true", "-N1", "-w", site.sandbox.nodes[0])  # without --resil: only the epilog comes by
    assert job == expected
    assert left.exists()
    assert [note["job"] for note in site.notes("left_alone")] == [job]
    left.rmdir()


def test_a_plugin_that_is_missing_or_of_another_kind_breaks_no_command(bare: Sandbox, tmp_path: Path) -> None:
    plugstack = bare.slurm_conf.parent / "plugstack.conf"
    other = bare.slurm_conf.parent / "other.so"
    other.write_bytes(b"not a plugin")
    for plugin in (other.with_name("gone.so"), other):
        plugstack.write_text(f"optional {plugin}\n")
        assert bare.run(["srun", "-N1", "hostname"], user="alice").stdout == f"{bare.nodes[0]}\n"
        done = bare.run(["sbatch", "--parsable", "--wait", "-N1", "--output=/dev/null", "--wrap=true"], user="alice")
        assert int(done.stdout) > 0
        refused = bare.run(["sbatch", "--resil", "--wrap=true"], user="alice", check=False)
        assert refused.returncode != 0
        assert "resil" in refused.stderr
    assert set(bare.node_states().values()) == {"idle"}
