"""`slurm-resil run --local` with ranks that fail, hang, linger; all processes are real, the state is a few bytes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import wait_for

from slurm_resil.format.manifest import digest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STATE_BYTES = 64 << 10


def expected(rank: int, iterations: int) -> str:
    """The digest of a rank's state after training without a fault: what raw.py computes, written again."""
    data = bytes(STATE_BYTES)
    for number in range(1, iterations + 1):
        block = hashlib.blake2b(data + f"{number} {rank}".encode()).digest()
        data = block * (STATE_BYTES // len(block))
    return digest(data)


class Run:
    """One call of the launcher, and what it left."""

    def __init__(self, base: Path, name: str, *options: str, launcher: tuple[str, ...] = (), ranks: int = 2) -> None:
        self.dir = base / "runs" / name
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAW_"))}
        env |= {
            "PYTHONPATH": os.pathsep.join([str(HERE / "rawsite"), str(ROOT)]),
            "SLURM_RESIL_BB_ROOT": str(base / "bb"),
            "SLURM_RESIL_PREFIX": str(base / "runs"),
        }
        argv = [sys.executable, "-m", "slurm_resil", "run", "--local", "--run-id", name, "--every", "10"]
        argv += [f"--ranks-per-node={ranks}", *launcher, "--", sys.executable, str(HERE / "raw_train.py"), *options]
        self.process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.dir / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def wait_event(self, name: str, count: int = 1) -> None:
        wait_for(f"{count} x {name}", lambda: len(self.named(name)) >= count or self.process.poll() is not None)
        assert len(self.named(name)) >= count

    def end(self, timeout_s: float = 60.0) -> tuple[int, list[dict[str, Any]], str]:
        out, self.err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, [json.loads(line) for line in out.splitlines()], self.err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*arguments: Any, **options: Any) -> Run:
        runs.append(Run(tmp_path, *arguments, **options))
        return runs[-1]

    yield make
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()


def last(lines: list[dict[str, Any]], word: str) -> dict[int, Any]:
    return {line["rank"]: line[word] for line in lines if word in line}


def test_it_trains_to_the_end_and_everything_is_durable(start):
    run = start("plain", "--iterations", "40", "--pace", "0.02")
    code, lines, err = run.end()
    assert code == 0, err
    assert last(lines, "digest") == {rank: expected(rank, 40) for rank in (0, 1)}
    assert run.events[-1]["event"] == "finished"
    assert run.events[-1]["durable"] == 40
    assert (run.dir / "ckpt-0000000040.json").exists()


@pytest.mark.parametrize("how", ["7", "-9", "-11"])
def test_a_rank_that_fails_takes_all_along_and_they_start_again(start, how):
    run = start("fail", "--iterations", "40", "--pace", "0.02", "--fail", f"1:25:{how}:once")
    code, lines, err = run.end()
    assert code == 0, err
    (restart,) = run.named("restart")
    assert restart["why"].startswith("rank 1 ")
    starts = [line["start"] for line in lines if line["rank"] == 0 and "start" in line]
    assert starts == [0, 20]
    assert last(lines, "digest") == {rank: expected(rank, 40) for rank in (0, 1)}


@pytest.mark.parametrize(("how", "verdict"), [("7", 7), ("-9", 137)])
def test_the_same_failure_twice_ends_the_job_with_the_ranks_verdict(start, how, verdict):
    run = start("again", "--iterations", "40", "--pace", "0.02", "--fail", f"1:25:{how}")
    code, lines, err = run.end()
    assert code == verdict
    assert "rank 1" in err.splitlines()[-1]
    assert "the same failure twice" in err
    assert [line["start"] for line in lines if line["rank"] == 0 and "start" in line] == [0, 20]
    assert run.events[-1]["durable"] == 20  # what there was is safe


def test_no_restarts_when_none_are_wanted(start):
    run = start("never", "--iterations", "40", "--fail", "0:15:3", launcher=("--max-restarts=0",))
    code, _, _ = run.end()
    assert code == 3
    assert not run.named("restart")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_ends_with_75_and_goes_on_later(start, number):
    run = start("stop", "--iterations", "400", "--pace", "0.05")
    run.wait_event("durable")
    run.process.send_signal(number)
    code, lines, err = run.end()
    assert code == 75, err
    stopped = set(last(lines, "stopped").values())
    assert len(stopped) == 1
    (at,) = stopped
    assert run.events[-1]["durable"] == at
    again = start("stop", "--iterations", str(at + 20), "--pace", "0.02")
    code, lines, err = again.end()
    assert code == 0, err
    assert last(lines, "start") == {0: at, 1: at}
    assert last(lines, "digest") == {rank: expected(rank, at + 20) for rank in (0, 1)}


def test_interrupted_twice_it_ends_at_once(start):
    run = start("twice", "--iterations", "400", "--deaf-from", "15")
    run.wait_event("sealed")
    run.process.send_signal(signal.SIGINT)
    run.wait_event("notice")
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    code, lines, _ = run.end()
    assert code == 130
    assert time.monotonic() - began < 8
    for line in lines:
        if "pid" in line:
            assert not Path(f"/proc/{line['pid']}").exists()


def test_ranks_that_do_not_end_after_a_stop_are_killed(start):
    run = start("linger", "--iterations", "400", "--pace", "0.02", "--linger")
    run.wait_event("sealed")
    run.process.send_signal(signal.SIGTERM)
    code, lines, err = run.end()
    assert code == 75, err
    assert run.events[-1]["durable"] == last(lines, "stopped")[0]


def test_a_drain_that_storage_refuses_fails_the_job_and_loses_nothing(start, tmp_path):
    (tmp_path / "runs" / "full").mkdir(parents=True)
    (tmp_path / "runs" / "full" / "no-drain").touch()
    run = start("full", "--iterations", "30", "--pace", "0.02")
    code, _, err = run.end()
    assert code == 1
    assert "burst buffer only" in err
    assert len(run.named("drain_failed")) <= 6
    (tmp_path / "runs" / "full" / "no-drain").unlink()
    again = start("full", "--iterations", "30")
    code, lines, err = again.end()
    assert code == 0, err
    assert {line["start"] for line in lines if "start" in line} == {30}
    assert again.events[-1]["durable"] == 30


def test_ranks_die_with_the_launcher(start):
    run = start("orphan", "--iterations", "4000", "--pace", "0.02")
    run.wait_event("restore")
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children")
    pids = [int(pid) for pid in children.read_text().split() if "raw_train" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(pids) == 2
    run.process.kill()
    wait_for("the ranks to end", lambda: not any(_alive(pid) for pid in pids))
    run.process.communicate()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_burst_buffer_that_cannot_be_written_is_one_clear_error(start, tmp_path):
    (tmp_path / "bb").write_text("not a directory")
    run = start("nobb", "--iterations", "10")
    code, _, err = run.end()
    assert code == 78
    assert str(tmp_path / "bb") in err.splitlines()[-1]


def test_a_command_that_does_not_exist_is_not_tried_for_ever(tmp_path):
    env = {**os.environ, "SLURM_RESIL_PREFIX": str(tmp_path), "SLURM_RESIL_BB_ROOT": str(tmp_path / "bb")}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE / "rawsite"), str(ROOT)])
    argv = [sys.executable, "-m", "slurm_resil", "run", "--local", "--run-id", "x", "--", "no-such-program"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 127
    assert "no-such-program: no such command" in done.stderr
