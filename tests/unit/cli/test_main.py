"""Every command ends in one line and a code, whatever happens to it; with --json in an object too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(
    *argv: str, env: dict[str, str] | None = None, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    # without root's rights a mode means something
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SLURM_RESIL"))}
    plain |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*drop, sys.executable, "-m", "slurm_resil", *argv],
        env=plain | (env or {}),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        cwd="/",
    )


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A directory that the command cannot look into."""
    for parent in [tmp_path, *tmp_path.parents][:-1]:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o755)
    (tmp_path / "closed").mkdir(mode=0o700)
    if os.geteuid() != 0:
        (tmp_path / "closed").chmod(0)
    return tmp_path / "closed"


@pytest.mark.parametrize("json_too", [False, True])
def test_what_the_file_system_refuses(closed: Path, json_too: bool) -> None:
    more = ["--json"] if json_too else []
    for argv in (["ckpt", "ls", "--run-dir", str(closed)], ["ckpt", "verify", "5", "--run-dir", str(closed)]):
        done = run(*argv, *more)
        assert done.returncode in (65, 77, 78), done.stderr
        assert "Traceback" not in done.stderr
        assert str(closed) in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        if json_too:
            said = json.loads(done.stdout)
            assert (said["ok"], said["exit_code"]) == (False, done.returncode)
            assert str(closed) in said["error"]


def test_a_prefix_that_is_closed_or_a_file(closed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for prefix in (closed, tmp_path / "file"):
        done = run("run", "--local", "--", "true", env={"SLURM_RESIL_PREFIX": str(prefix)})
        assert done.returncode in (77, 78), done.stderr
        assert "Traceback" not in done.stderr
        assert str(prefix) in done.stderr


def test_a_full_disk_for_the_output() -> None:
    with open("/dev/full", "w") as full:
        done = run("site", "check", stdout=full.fileno())
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr


def test_a_configuration_of_slurm_that_is_not_there() -> None:
    for argv in (["job", "status", "1"], ["job", "deadline", "1", "--json"]):
        done = run(*argv, env={"SLURM_CONF": "/nowhere/slurm.conf"})
        assert (done.returncode, "SLURM_CONF=/nowhere/slurm.conf does not exist" in done.stderr) == (78, True)


def test_a_run_that_nobody_names(tmp_path: Path, closed: Path) -> None:
    (tmp_path / "llama").mkdir()
    done = run("ckpt", "ls", env={"SLURM_RESIL_PREFIX": str(tmp_path)})
    assert done.returncode == 2
    assert "llama" in done.stderr


def test_a_run_with_an_impossible_name(tmp_path: Path) -> None:
    done = run("run", "--local", "--", "true", env={"SLURM_RESIL_RUN_ID": "x" * 300, "SLURM_RESIL_PREFIX": "/tmp"})
    assert (done.returncode, "cannot name a run" in done.stderr) == (78, True)


def test_a_wrong_option_in_json() -> None:
    done = run("ckpt", "ls", "--json", "--nope")
    assert done.returncode == 2
    assert json.loads(done.stdout)["exit_code"] == 2


def test_an_agent_that_a_person_starts_is_a_wrong_call() -> None:
    done = run("agent")
    assert done.returncode == 2 and "slurm-resil run" in done.stderr
