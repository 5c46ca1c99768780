"""The benchmark of the drain, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.mpi


def test_one_json_object_of_the_agreed_form(tmp_path):
    argv = [sys.executable, "-m", "slurm_resil", "bench", "drain", "--json", "--size-mib", "4", "--repeats", "1"]
    done = subprocess.run([*argv, "--dir", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert set(result) == {"bench", "size_bytes", "repeats", "ratios", "figures", "machine"}
    assert (result["bench"], result["size_bytes"], result["repeats"]) == ("drain", 4 << 20, 1)
    for kind in ("rows", "columns", "replicated"):
        assert result["ratios"][f"{kind}_drain_to_copy_throughput"] > 0
        assert 1 <= result["ratios"][f"{kind}_most_written_to_share"] <= 1.5
        figures = {name: value for name, value in result["figures"].items() if name.startswith(kind)}
        assert figures[f"{kind}_write_s"] + figures[f"{kind}_verify_s"] <= figures[f"{kind}_seconds_s"]
        assert figures[f"{kind}_seconds_s"] < figures[f"{kind}_wall_s"]
    assert os.listdir(tmp_path) == []
