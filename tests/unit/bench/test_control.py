from __future__ import annotations

import json
import subprocess
import sys


def test_a_step_costs_less_than_two_microseconds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slurm_resil", "bench", "control", "--json", "--calls", "50000", "--repeats", "5"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"bench", "size_bytes", "repeats", "ratios", "figures", "machine"}
    assert (result["bench"], result["repeats"]) == ("control", 5)
    assert 0 < result["figures"]["step_us"] < 2.0
    # it does something: two stores and loads more than an empty call
    assert result["ratios"]["step_over_call"] > 1.0
