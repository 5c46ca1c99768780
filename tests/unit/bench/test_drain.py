"""The benchmark of the drain, small, with real movers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resil.bench import peers
from slurm_resil.bench.drain import measure
from slurm_resil.core.errors import ResilError

pytestmark = pytest.mark.mpi
RATIOS = ("dd", "cp", "verified_dd", "strided", "strided_naive", "resume_bytes", "training", "share")


def test_ratios_and_figures(tmp_path):
    result = measure(size_bytes=16 << 20, repeats=1, target=str(tmp_path), settle_s=0.0, training_s=1.0)
    assert set(result.ratios) - {"drain.dcp"} == {f"drain.{name}" for name in RATIOS}
    assert all(value > 0 for value in result.ratios.values())
    assert 0.05 < result.ratios["drain.resume_bytes"] < 0.6  # rounds are few in so small a checkpoint
    assert 1 <= result.ratios["drain.share"] <= 1.5
    assert 0 < result.figures["mover_bytes"] <= 128 << 20
    for kind in ("rows", "verified", "columns"):
        parts = sum(result.figures[f"{kind}_{part}_s"] for part in ("skeleton", "write", "verify"))
        assert parts <= result.figures[f"{kind}_s"] * 1.01 < result.figures[f"{kind}_wall_s"]
    assert os.listdir(tmp_path) == []


def test_one_json_object_of_the_agreed_form(tmp_path):
    argv = [sys.executable, "-m", "slurm_resil", "bench", "drain", "--json", "--size-mib", "4", "--repeats", "1"]
    argv += ["--dir", str(tmp_path), "--settle", "0", "--no-training"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert set(result) == {"bench", "size_bytes", "repeats", "ratios", "figures", "machine"}
    assert (result["bench"], result["size_bytes"], result["repeats"]) == ("drain", 4 << 20, 1)
    assert "drain.training" not in result["ratios"]


def test_the_narrow_writes_make_the_file_that_the_drain_makes(tmp_path, monkeypatch):
    """So they are writes of the same pattern."""
    parts = [os.urandom(64), os.urandom(64)]
    for number, data in enumerate(parts):
        (tmp_path / str(number)).write_bytes(bytes(peers.FIRST) + data)
    seen = []
    monkeypatch.setattr(peers, "_sync", lambda path: seen.append(Path(path).read_bytes()))
    runs = [peers.Runs(first=number * 16, step=32, nbytes=16) for number in range(2)]
    assert peers.naive([str(tmp_path / "0"), str(tmp_path / "1")], runs, str(tmp_path)) > 0
    a, b = parts
    assert seen == [b"".join(a[at : at + 16] + b[at : at + 16] for at in range(0, 64, 16))]


def test_what_fails_is_said(tmp_path):
    with pytest.raises(ResilError, match=r"dd ended with 1: .*No such file"):
        peers.dd([str(tmp_path / "none")], str(tmp_path))
