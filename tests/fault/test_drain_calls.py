"""A drain, stopped or refused at every system call on the parallel file system: one after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import shim

pytestmark = pytest.mark.timeout(300)
CAMPAIGN = str(Path(__file__).with_name("drain_calls.py"))
MET = {"open", "write", "link", "ftruncate", "fsync", "rename", "unlink", "close"}


def campaign(tmp_path: Path, errors: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": shim.build(tmp_path)}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as directory:
        argv = [sys.executable, "-W", "ignore", CAMPAIGN, directory, errors]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert set(found["calls"]) >= MET
    print(f"{len(found['calls'])} calls, {found['runs']} runs")
    return dict(found)


def test_killed_at_every_call(tmp_path: Path) -> None:
    """What is published is whole, and the next drain works."""
    found = campaign(tmp_path, "")
    assert found["runs"] == 2 * len(found["calls"])
    assert 0 < found["durable"] < 20  # from the manifest's rename on


@pytest.mark.parametrize(
    "errors", ["EIO", *(pytest.param(e, marks=pytest.mark.full) for e in ("ENOSPC,EDQUOT", "ESTALE"))]
)
def test_refused_at_every_call(tmp_path: Path, errors: str) -> None:
    found = campaign(tmp_path, errors)
    assert found["failed"] > found["durable"] > 0
