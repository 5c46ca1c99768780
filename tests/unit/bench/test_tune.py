"""What the tuner tries and what it prints is what a site may write."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from slurm_resil.bench import tune
from slurm_resil.core import config
from slurm_resil.core.config import Drain


def test_the_best_is_found_step_by_step_and_a_site_may_write_it(tmp_path):
    seen = []

    def measure(drain: Drain) -> float:
        seen.append(drain)
        seconds = 10.0
        seconds -= 3.0 if drain.buffer_bytes == 32 << 20 else 0.0
        seconds -= 2.0 if drain.hints.get("cb_nodes") == "2" and not drain.gather else 0.0
        seconds -= 1.0 if drain.hints.get("romio_cb_write") == "enable" and not drain.gather else 0.0
        return seconds - (0.01 if drain.hints.get("cb_buffer_size") else 0.0)  # not clearly better

    steps, notes = tune.choices(str(tmp_path), 4)
    found = tune.search(steps, measure, lambda _: None)
    assert seen[0] == Drain() and found.usual == 10.0 and found.best.seconds == 4.0
    assert len({str(one) for one in seen}) == len(seen)  # nothing twice
    assert any("stripes are not tried" in note for note in notes)
    (tmp_path / "site.toml").write_text(found.best.words)
    made = config.load({}, str(tmp_path / "site.toml")).drain
    assert made == found.best.drain
    assert found.best.arguments == (
        "--hint=cb_nodes=2",
        "--hint=romio_cb_write=enable",
        f"--buffer={32 << 20}",
        "--no-gather",
    )


def test_nothing_better_is_said():
    found = tune.search([[{"buffer_bytes": 1 << 24}]], lambda _: 1.0, lambda _: None)
    assert found.best.words.startswith("# nothing") and len(found.tried) == 2


@pytest.mark.mpi
def test_with_real_movers(tmp_path, monkeypatch):
    steps, _ = tune.choices(str(tmp_path), 2)
    monkeypatch.setattr(tune, "choices", lambda *_: ([step[:1] for step in steps[1:3]], ["a note"]))
    found = tune.tune(size_bytes=4 << 20, repeats=1, target=str(tmp_path))
    assert [one.drain.hints for one in found.tried][:2] == [{}, {"romio_cb_write": "enable"}]
    assert all(one.seconds > 0 for one in found.tried) and found.notes == ["a note"]


@pytest.mark.full
@pytest.mark.mpi
def test_the_command(tmp_path):
    argv = [sys.executable, "-m", "slurm_resil", "bench", "drain", "--tune", "--json", "--size-mib", "4"]
    done = subprocess.run([*argv, "--repeats", "1", "--settle", "0", "--dir", str(tmp_path)], capture_output=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tried"] and result["site_toml"] and result["notes"]
