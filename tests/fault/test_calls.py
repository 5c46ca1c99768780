"""A save that is stopped or refused at every system call on its files: all of them, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shim

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
CAMPAIGN = str(Path(__file__).with_name("save_calls.py"))
# what a save cannot do without, by scene: a campaign that has not met them has counted nothing
MET = {
    "first": {"mkdir", "open", "write", "ftruncate", "fallocate", "mmap", "madvise", "rename", "fsync", "close"},
    "again": {"unlink", "open", "write", "rename", "mmap", "fsync", "close"},
    "other layout": {"unlink", "open", "write", "ftruncate", "fallocate", "mmap", "madvise", "rename", "fsync"},
}
ERRORS = ["ENOSPC", "EIO", "EDQUOT", "EROFS"]


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shim.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[str]:
    """Where burst buffers are: in memory, if there is a file system for that."""
    where = "/dev/shm" if os.path.isdir("/dev/shm") else tmp_path
    with tempfile.TemporaryDirectory(dir=where) as made:
        yield made


def campaign(preload: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "LD_PRELOAD": preload}
    return subprocess.run(
        [sys.executable, "-W", "ignore", CAMPAIGN, *arguments], env=environment, capture_output=True, text=True
    )


def report(done: subprocess.CompletedProcess[str], scene: str) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert MET[scene] <= set(found["calls"])
    print(f"{scene}: {len(found['calls'])} calls, {found['runs']} runs")
    return dict(found)


@pytest.mark.parametrize("scene", list(MET))
def test_killed_at_every_call(preload: str, directory: str, scene: str) -> None:
    """Restored is the one before or the new one, bit for bit, and the next save works."""
    found = report(campaign(preload, directory, scene, ""), scene)
    assert found["runs"] == 2 * len(found["calls"])
    assert found["new"] == 3  # after its rename, and on both sides of the directory's sync
    assert found["old"] == found["runs"] - 3


@pytest.mark.parametrize(
    ("scene", "errors"), [("first", "EROFS"), ("again", ",".join(ERRORS)), ("other layout", "ENOSPC")]
)
def test_refused_at_every_call(preload: str, directory: str, scene: str, errors: str) -> None:
    """The save succeeds or says that it failed; the next one works; no file stays open, no memory mapped."""
    found = report(campaign(preload, directory, scene, errors), scene)
    # once and from there on; writes are also cut short, once and with no space after that
    assert found["runs"] == 2 * len(found["calls"]) * (errors.count(",") + 1) + 2 * found["calls"].count("write")
    assert found["failed"] > found["saved"] > 0


@pytest.mark.full
@pytest.mark.parametrize("scene", list(MET))
@pytest.mark.parametrize("error", ERRORS)
def test_refused_at_every_call_with_every_error(preload: str, directory: str, scene: str, error: str) -> None:
    report(campaign(preload, directory, scene, error), scene)


def test_a_file_published_without_a_rename_is_found_out(preload: str, directory: str) -> None:
    done = campaign(preload, directory, "again", "", "torn")
    assert done.returncode != 0
    assert "DataError" in done.stderr
