"""The named points: each is one at which some test stops what is running."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# what a kill there leaves: 1 is the save before, 2 the one that was killed
DCP = {"saved.write": 1, "dcp.slot": 1, "saved.seal": 1, "dcp.sealed": 1, "dcp.finish": 1, "dcp.published": 2}
DCP |= {"saved.prune": 2}


def points() -> set[str]:
    """Names that the product passes to ``faults.point``."""
    found = set()
    for path in (ROOT / "slurm_resil").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "faults.point":
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: a name that can be found is needed"
                found.add(str(name.value))
    return found


def texts() -> Iterator[str]:
    """All strings of the tests, but for those of this module that are not used as faults."""
    for path in (ROOT / "tests").rglob("*.py"):
        if path != Path(__file__):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
    yield from DCP


def test_some_test_stops_at_every_named_point() -> None:
    names = points()
    asked = {name for text in texts() for entry in text.split(",") for name in [entry.partition(":")[0]]}
    missed = names - asked
    print(f"{len(names - missed)} of {len(names)} named points, without {sorted(missed)}")
    assert len(names) > 20
    assert not missed


@pytest.mark.torch
def test_saves_of_distributed_checkpoint_are_whole_or_not_there(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("dcp_kills.py"))
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), *DCP], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == DCP
