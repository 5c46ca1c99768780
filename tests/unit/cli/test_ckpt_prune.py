"""``ckpt prune``, ``ckpt keep`` and what ``ckpt ls`` says of it, as a user calls them."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
sys.path.insert(0, str(Path(__file__).parent))

from command import ckpt
from stock import drained, left

from slurm_resil.core import paths
from slurm_resil.core.retention import ALL


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for iteration, loss in ((10, 0.5), (20, 0.1), (30, 0.3), (40, 0.2)):
        drained(tmp_path / "r", iteration, loss=loss)
    return tmp_path / "r"


def prune(run: Path, *arguments: str, env: dict[str, str] | None = None):
    return ckpt("prune", "--run-dir", str(run), *arguments, env=env)


def test_it_says_and_does_nothing_until_it_is_told_to(run):
    before = sorted(os.listdir(run))
    done = prune(run, "--keep-last", "1", "--keep-best", "loss:min")
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()[:4]]
    assert lines == [["40", "newest"], ["30", "would be deleted"], ["20", "best loss"], ["10", "would be deleted"]]
    assert "--yes" in done.stdout and sorted(os.listdir(run)) == before
    done = prune(run, "--keep-last", "1", "--keep-best", "loss:min", "--yes")
    assert done.returncode == 0 and done.stdout.count("  deleted") == 2
    assert left(run) == [20, 40]


def test_json(run):
    Path(paths.drained_part(str(run), 15)).write_bytes(b"half")
    done = prune(run, "--keep-every", "20", "--json")
    got = json.loads(done.stdout)
    assert (got["deleted"], got["go"], got["cleared"]) == (False, [10, 30], [15])
    assert got["kept"] == {"40": ["newest", "every 20"], "20": ["every 20"]}
    got = json.loads(prune(run, "--keep-every", "20", "--yes", "--json").stdout)
    assert (got["deleted"], got["go"], got["cleared"], got["bytes"]) == (True, [10, 30], [15], 204)


def test_the_rules_are_those_of_the_run_if_none_is_given(run):
    env = {"SLURM_RESIL_KEEP_LAST": "2"}
    assert json.loads(prune(run, "--json", env=env).stdout)["go"] == [10, 20]
    # rules that are given hold alone
    assert json.loads(prune(run, "--json", "--keep-every", "30", env=env).stdout)["go"] == [10, 20]
    site = run.parent / "site.toml"
    site.write_text("[prefix]\nkeep_last = 3\n")
    assert json.loads(prune(run, "--json", env={"SLURM_RESIL_SITE": str(site)}).stdout)["go"] == [10]
    for arguments in ((), ("--keep-last", "all"), ("--keep-last", str(ALL - 1))):
        done = prune(run, "--yes", *arguments)
        assert done.returncode == (2 if len(arguments) < 2 or arguments[1] == "all" else 0)
    assert left(run) == [10, 20, 30, 40]


def test_what_is_in_use_is_told(run):
    fd = os.open(paths.drained(str(run), 20), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    done = prune(run, "--keep-last", "1", "--yes")
    os.close(fd)
    assert done.returncode == 75 and "iteration 20: somebody reads it" in done.stderr
    assert "20  stays: somebody reads it" in done.stdout
    assert left(run) == [20, 40]


def test_a_person_keeps_one_and_releases_it(run):
    assert ckpt("keep", "10", "--run-dir", str(run)).returncode == 0
    assert json.loads(prune(run, "--keep-last", "1", "--json").stdout)["go"] == [20, 30]
    assert ckpt("keep", "10", "--release", "--run-dir", str(run)).returncode == 0
    assert json.loads(prune(run, "--keep-last", "1", "--json").stdout)["go"] == [10, 20, 30]
    for arguments, words in ((("10", "--release"), "not kept by hand"), (("11",), "not there")):
        done = ckpt("keep", *arguments, "--run-dir", str(run))
        assert done.returncode == 2 and words in done.stderr
    assert not [name for name in os.listdir(run) if name.endswith(".keep")]


def test_ls_says_metrics_and_why_each_stays(run):
    env = {"SLURM_RESIL_KEEP_LAST": "1", "SLURM_RESIL_KEEP_BEST": "loss:min"}
    rows = json.loads(ckpt("ls", "--json", "--run-dir", str(run), env=env).stdout)["checkpoints"]
    assert [(row["iteration"], row["metrics"], row["kept"]) for row in rows] == [
        (40, {"loss": 0.2}, ["newest"]),
        (30, {"loss": 0.3}, []),
        (20, {"loss": 0.1}, ["best loss"]),
        (10, {"loss": 0.5}, []),
    ]
    text = ckpt("ls", "--run-dir", str(run), env=env).stdout
    assert "loss=0.1" in text and "best loss" in text and text.count("goes with the next deletion") == 2
    assert ckpt("ls", "--run-dir", str(run)).stdout.count("everything is kept") == 4
