"""The scripts that users start: they fail with a clear word, and they install what pyproject.toml asks for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import story

ROOT = Path(__file__).resolve().parents[2]
JOBSCRIPTS = ROOT / "jobscripts"
BOOTSTRAP = JOBSCRIPTS / "bootstrap.sh"
SCRIPTS = sorted([*JOBSCRIPTS.glob("*.sh"), *JOBSCRIPTS.glob("*.sbatch"), ROOT / "tests/run.sh", ROOT / ".ci/run"])
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def run(argv: list[str | Path], **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in argv], capture_output=True, text=True, timeout=60, **kwargs)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_valid_bash(script: Path) -> None:
    result = run(["bash", "-n", script])
    assert (result.returncode, result.stderr) == (0, "")


def test_batch_script_is_short_and_uses_the_product() -> None:
    lines = (JOBSCRIPTS / "train_gpt.sbatch").read_text().splitlines()
    assert len(lines) <= 15
    assert "#SBATCH --resil" in lines
    assert any(line.startswith("slurm-resil run ") for line in lines)


def test_the_training_script_has_three_lines_for_the_product() -> None:
    text = (JOBSCRIPTS / "train_gpt.py").read_text()
    assert len(re.findall(r"sr\.|checkpointer\.", text)) == 3


def test_each_requirement_has_an_upper_bound() -> None:
    constraints = re.search(r"CONSTRAINTS='(.*?)'", BOOTSTRAP.read_text(), re.DOTALL)
    assert constraints is not None
    bounds = dict(re.findall(r"^([A-Za-z0-9-]+)(.*)$", constraints[1], re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [*extras["torch"], *extras["mpi"], *extras["export"], *extras["dev"]]
    names = {re.match(r"[A-Za-z0-9-]+", requirement)[0] for requirement in wanted}  # type: ignore[index]
    assert names == {name for name, bound in bounds.items() if "<" in bound or "==" in bound}


def test_bootstrap_refuses_unknown_options() -> None:
    result = run([BOOTSTRAP, "--frobnicate"])
    assert result.returncode == 2
    assert "usage:" in result.stderr


@needs_root
def test_bootstrap_wants_root() -> None:
    result = run(["/bin/bash", "-s"], input=BOOTSTRAP.read_text(), user=65534, group=65534, extra_groups=[], cwd="/")
    assert result.returncode == 1
    assert "run this as root" in result.stderr


@needs_root
def test_bootstrap_wants_apt() -> None:
    result = run(["/bin/bash", BOOTSTRAP], env={"PATH": "/nonexistent"})
    assert result.returncode == 1
    assert "no apt here" in result.stderr


@needs_root
def test_bootstrap_wants_a_cache_that_jobs_can_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    result = run([BOOTSTRAP, "--no-system"], env={**os.environ, "SLURM_RESIL_CACHE": str(tmp_path / "cache")})
    assert result.returncode == 1
    assert "closed to other users" in result.stderr


LOG = """\
0: starting at iteration 0 with 4 ranks
0: iteration 1 loss 5.5 seconds 0.1
0: iteration 2 loss 5.4 seconds 0.1
2: iteration 9 loss 5.4 seconds 0.1
srun: error: node3: iteration 7
0: starting at iteration 1 with 4 ranks
0: iteration 2 loss 5.4 seconds 0.1
0: iteration 3 loss 5.3 sec"""


def test_what_a_job_lost_is_read_from_its_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = story.Job(id=1, directory=tmp_path, log=log)
    job.read_log()
    assert (job.iteration, job.starts) == (0, [])
    for end in range(0, len(LOG), 7):  # as it grows
        log.write_text(LOG[:end])
        job.read_log()
    log.write_text(LOG)
    job.read_log()
    assert job.starts == [0, 1]
    assert job.iteration == 2  # of the last line only a part is there
    assert job.lost(1) == 1
    assert job.gap_s(1) >= 0


def test_a_single_different_value_is_found(tmp_path: Path) -> None:
    for name in ("one", "other"):
        for rank in range(story.RANKS):
            parts = {"model.w": "aa", "loader.position": "bb" if (name, rank) != ("other", 2) else "bc"}
            text = json.dumps({"iteration": 5, "parts": parts})
            (tmp_path / f"{name}.{rank}").write_text(text)
    assert story.compare(tmp_path / "one", tmp_path / "one") == []
    assert story.compare(tmp_path / "one", tmp_path / "other") == ["rank 2: loader.position"]
