"""Retention in a run that trains, drains and deletes: ``run --local`` with real agents, movers and HDF5 files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest

from slurm_resil.catalog import RunCatalog

pytestmark = pytest.mark.torch

TRAIN = """
import os, sys, time
import torch
import slurm_resil as sr

losses = dict(pair.split("=") for pair in sys.argv[2:])
state = {"model": torch.nn.Linear(3, 2), "seen": {"last": 0}}
with sr.Checkpointer.from_env(state, every=10) as checkpointer:
    start = checkpointer.restore()
    print("start", start, flush=True)
    for number in range(start + 1, int(sys.argv[1]) + 1):
        state["seen"]["last"] = number
        time.sleep(0.005)
        if str(number) in losses:
            checkpointer.metric(loss=torch.tensor(float(losses[str(number)])))
        checkpointer.step(number)
        if number % 10 == 0:
            # each becomes durable before the next one is saved
            manifest = os.path.join(os.environ["SLURM_RESIL_PREFIX"], "r", f"ckpt-{number:010d}.json")
            until = time.monotonic() + 50
            while not os.path.exists(manifest) and time.monotonic() < until:
                time.sleep(0.005)
"""


class Run:
    """A call of the launcher."""

    def __init__(self, work: Path, *options: str, train: tuple[str, ...], keep: dict[str, str] | None = None) -> None:
        (work / "bb").mkdir(exist_ok=True)
        (work / "train.py").write_text(TRAIN)
        self.dir = work / "pfs" / "r"
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        env |= {"SLURM_RESIL_BB_ROOT": str(work / "bb"), "SLURM_RESIL_PREFIX": str(work / "pfs"), **(keep or {})}
        argv = [sys.executable, "-m", "slurm_resil", "run", "--local", "--run-id", "r", *options, "--"]
        self.process = subprocess.Popen(
            [*argv, sys.executable, "train.py", *train], cwd=work, env=env, stdout=-1, stderr=-1, text=True
        )

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=100)
        return self.process.returncode, out, err

    @property
    def drained(self) -> list[int]:
        return sorted(RunCatalog(str(self.dir), run_id="r").durable())

    def order(self) -> list[tuple[str, int]]:
        """What became durable and what was deleted, in the order of the event log."""
        found: list[tuple[str, int]] = []
        for line in (self.dir / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            found += [("durable", event["iteration"])] if event["event"] == "durable" else []
            found += [("deleted", one) for one in event["iterations"]] if event["event"] == "pruned" else []
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*options: str, **more: Any) -> Run:
        runs.append(Run(tmp_path, *options, **more))
        return runs[-1]

    yield make
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()


def test_keep_one_keeps_one_and_deletes_only_behind_a_durable_successor(start):
    run = start("--keep-last", "1", train=("40",))
    counts = []
    while run.process.poll() is None:
        counts.append(len(run.drained))
        time.sleep(0.002)
    code, _, err = run.end()
    assert code == 0, err
    assert run.drained == [40]
    assert sorted(name for name in os.listdir(run.dir) if "ckpt-" in name) == [
        *("ckpt-0000000040.h5", "ckpt-0000000040.json")
    ]
    with h5py.File(run.dir / "ckpt-0000000040.h5") as file:
        assert file.attrs["iteration"] in (40, b"40", "40")
    happened = run.order()
    assert [one for one in happened if one[0] == "durable"] == [("durable", n) for n in (10, 20, 30, 40)]
    for iteration in (10, 20, 30):
        at = happened.index(("deleted", iteration))
        assert ("durable", iteration + 10) in happened[:at], happened
    first = next(index for index, count in enumerate(counts) if count)
    assert min(counts[first:]) >= 1  # at no moment was there none
    assert max(counts) <= 3
    assert f"kept in {run.dir}: the last one; the others are deleted once a newer one is durable" in err


def test_the_best_and_every_so_many_stay_as_the_environment_says(start):
    keep = {"SLURM_RESIL_KEEP_EVERY": "30", "SLURM_RESIL_KEEP_BEST": "loss:min"}
    run = start(train=("50", "10=0.5", "19=0.1", "20=0.3", "30=nan", "40=0.4"), keep=keep)
    code, _, err = run.end()
    assert code == 0, err
    assert run.drained == [20, 30, 50]  # the value given last before a save is the one that is kept with it
    kept = {n: json.loads((run.dir / f"ckpt-{n:010d}.json").read_text()).get("metrics") for n in (20, 30, 50)}
    assert kept[20] == {"loss": pytest.approx(0.3)}
    assert kept[30] is None and kept[50] is None


def test_by_default_nothing_is_deleted(start):
    run = start(train=("30",))
    code, _, err = run.end()
    assert code == 0, err
    assert run.drained == [10, 20, 30] and "deleted" not in err


def test_a_killed_launcher_leaves_what_can_be_restored_and_the_next_one_clears_up(start):
    run = start("--keep-last", "1", train=("4000",))
    limit = time.monotonic() + 60
    while not run.dir.exists() or not (run.dir / "events.jsonl").exists() or ("deleted", 10) not in run.order():
        assert time.monotonic() < limit and run.process.poll() is None
        time.sleep(0.01)
    os.kill(run.process.pid, signal.SIGKILL)
    run.end()
    there = run.drained
    assert there
    for iteration in there:
        RunCatalog(str(run.dir), run_id="r").load(iteration)
    (run.dir / ".ckpt-0000000001.h5.part").write_bytes(b"of a mover that was killed")
    last = max(there) + 20
    again = start("--keep-last", "1", train=(str(last),))
    code, out, err = again.end()
    assert code == 0, err
    assert int(out.split()[1]) >= min(there)
    assert again.drained == [last]
    assert not [name for name in os.listdir(run.dir) if name.startswith(".ckpt-0000000001")]


def test_a_rule_that_makes_no_sense_is_refused_before_anything_starts(start):
    for options, words in (
        (("--keep-last", "0"), "is not how many checkpoints are kept"),
        (("--keep-best", "loss"), "as in loss:min"),
        (("--keep-interval", "10"), "is not a duration"),
    ):
        run = start(*options, train=("1",))
        code, _, err = run.end()
        assert code == 2 and words in err
        assert not run.dir.exists()
