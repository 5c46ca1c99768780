"""A restore holds little beyond the state and the slot's own pages, however large the state is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
MOST_BYTES = 64 << 20


@pytest.mark.parametrize("tensors", [6, 3000])
def test_a_restore_needs_little_memory_of_its_own(tmp_path, tensors):
    where = "/dev/shm" if os.path.isdir("/dev/shm") else tmp_path
    with tempfile.TemporaryDirectory(dir=where) as directory:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(Path(__file__).parent / "restore_memory.py"), directory, str(tensors)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    # the state is three times as large: a copy of it would show
    assert report["local"] < MOST_BYTES
    assert report["drained"] < MOST_BYTES
