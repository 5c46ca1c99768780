"""What the launcher makes of what movers say, and what ``job status`` shows of it."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from slurm_resil.cli import draining as people
from slurm_resil.core import paths
from slurm_resil.core.errors import TryAgainError
from slurm_resil.drain.orders import Orders
from slurm_resil.launch import moves as m
from slurm_resil.launch.draining import Draining, DrainStatus
from slurm_resil.launch.records import Attempt

WRITES = {
    "event": "progress",
    "phase": "write",
    "bytes": 30 << 20,
    "total": 100 << 20,
    "rate_bytes_s": 10 << 20,
    "left_s": 7.0,
    "waits": "the cap",
}
HANGS = {"event": "hangs", "node": "n2", "doing": "writing /pfs/x", "seconds": 40.0}
RETRY = {"event": "retry", "error": "writing: no space", "in_s": 4.0, "left_s": 50.0}
RESUMED = {"event": "resumed", "kept_bytes": 20 << 20, "refuted_bytes": 0}


class Heard:
    """A Draining, and what it has told."""

    def __init__(self, run_dir: Any) -> None:
        self.run_dir = str(run_dir)
        Attempt(self.run_dir, 2, job_id=1, restarts=2, nodes=("n1",)).update()
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.put: list[m.Event] = []
        self.draining = Draining(
            self.run_dir, 2, say=lambda name, **fields: self.said.append((name, fields)), put=self.put.append
        )
        self.draining.start(40, 2e6)

    def hear(self, *lines: Any) -> None:
        for line in lines:
            self.draining.hear(line if isinstance(line, str) else json.dumps(line))

    def status(self) -> DrainStatus:
        self.draining.close(5.0)
        found = DrainStatus.read(self.run_dir)
        assert found is not None
        return found

    def words(self) -> str:
        shown = people.shown(self.status(), running=True, as_json=False)
        assert isinstance(shown, str)
        return shown


def test_all_that_is_heard_is_shown_and_told(tmp_path):
    heard = Heard(tmp_path)
    heard.hear("srun: something", "{", "[1]", '{"event": "progress"}', RESUMED, WRITES, RETRY, HANGS)
    assert heard.put == [m.DrainBegan(iteration=40)]
    words = heard.words()
    for part in (
        "iteration 40: write, 30 % of 100.0 MiB, 10.0 MiB/s, 7 s left",
        "at most 1.9 MiB/s",
        "waits: the cap",
        "storage hangs on n2 since 40 s (writing /pfs/x)",
        "storage refused (writing: no space); given up after 50 s more",
        "resumed: 20.0 MiB were there already",
    ):
        assert part in words
    assert [name for name, _ in heard.said] == ["drain_resumed", "drain_retry", "drain_hangs"]
    assert all(fields["iteration"] == 40 for _, fields in heard.said)
    shown = people.shown(heard.status(), running=True, as_json=True)
    assert isinstance(shown, dict)
    assert (shown["state"], shown["attempt"], shown["phase"]) == ("running", 2, "write")
    assert 40.0 <= shown["hangs"]["n2"]["seconds"] < 60.0
    json.dumps(shown)


def test_storage_that_answers_again_hangs_no_more(tmp_path):
    heard = Heard(tmp_path)
    heard.hear(HANGS, {**HANGS, "node": "n3"}, {**HANGS, "event": "went_on", "seconds": 61.0})
    assert "n2" not in heard.words() and "n3" in heard.words()
    assert heard.said[-1] == (
        "drain_went_on",
        {"iteration": 40, "node": "n2", "doing": "writing /pfs/x", "seconds": 61.0},
    )


def test_orders_that_were_taken(tmp_path):
    heard = Heard(tmp_path)
    heard.hear(WRITES, {"event": "ordered", "cap_bytes_s": None, "finish": True})
    assert heard.put[-1] == m.OrderTaken(iteration=40, finish=True)
    assert "at most" not in heard.words()


@pytest.mark.parametrize(
    ("ok", "lines", "state"),
    [(True, (), "durable"), (False, (), "failed"), (False, ({"event": "cancelled", "iteration": 40},), "cancelled")],
)
def test_how_a_drain_ended(tmp_path, ok, lines, state):
    heard = Heard(tmp_path)
    heard.hear(WRITES, HANGS, *lines)
    words = "" if ok else "storage refuses"
    ended = heard.draining.end(m.MoverEnded(iteration=40, ok=ok, duration_s=1.0, words=words))
    assert ended.cancelled == (state == "cancelled")
    assert heard.words() == f"iteration 40: {state}" + (f": {words}" if words else "")


def test_a_mover_that_says_nothing_and_a_launcher_that_is_gone(tmp_path):
    heard = Heard(tmp_path)
    heard.hear(WRITES)
    old = heard.status()
    quiet = DrainStatus(**{**vars(old), "at_s": time.time() - 30})
    assert "nothing is heard of it since 30 s" in str(people.shown(quiet, running=True, as_json=False))
    assert people.shown(quiet, running=False, as_json=False) == "iteration 40: interrupted"
    assert people.shown(None, running=True, as_json=False) is None


def test_storage_that_hangs_does_not_keep_the_launcher_from_hearing(tmp_path):
    answers = threading.Event()
    put: list[m.Event] = []
    draining = Draining(str(tmp_path), 0, say=lambda *_, **__: answers.wait(10), put=put.append)
    draining.start(40, None)
    draining.hear(json.dumps(HANGS))
    begin = time.monotonic()
    draining.hear(json.dumps({"event": "ordered", "cap_bytes_s": None, "finish": True}))
    draining.close(0.2)
    assert time.monotonic() - begin < 5
    assert put[-1] == m.OrderTaken(iteration=40, finish=True)
    answers.set()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"version": 1}', '{"version": 9, "iteration": 1, "attempt": 0}']
)
def test_a_status_that_is_none(tmp_path, text):
    with open(paths.drain_status(str(tmp_path)), "w") as file:
        file.write(text)
    assert DrainStatus.read(str(tmp_path)) is None


def test_what_an_earlier_attempt_has_left_behind_runs_no_more(tmp_path):
    heard = Heard(tmp_path)
    heard.hear(WRITES)
    heard.status()
    found = people.known(heard.run_dir)
    assert found is not None and found.state == "running"
    Attempt(heard.run_dir, 3, job_id=1, restarts=3, nodes=("n1",)).update()
    found = people.known(heard.run_dir)
    assert found is not None
    assert people.shown(found, running=True, as_json=False) == "iteration 40: interrupted"
    with pytest.raises(TryAgainError, match="no drain runs; the last one, of iteration 40, is interrupted"):
        people.cancel_drain(heard.run_dir, timeout_s=1.0)
    assert people.known(str(tmp_path / "none")) is None


def test_a_drain_that_is_cancelled_may_be_followed_by_the_next_one_at_once(tmp_path):
    heard = Heard(tmp_path)
    heard.status().write(heard.run_dir)
    begun = heard.status()
    heard = Heard(tmp_path)  # its thread has ended
    heard.draining._status = begun
    heard.hear(WRITES, {"event": "cancelled", "iteration": 40})
    heard.draining.end(m.MoverEnded(iteration=40, ok=False, duration_s=1.0))
    heard.draining.start(50, None)
    follow = threading.Timer(0.5, heard.status)
    follow.start()
    ended = people.cancel_drain(heard.run_dir, timeout_s=20.0)
    follow.join()
    assert (ended.iteration, ended.state) == (40, "cancelled")


def test_a_person_cancels_the_drain_that_runs(tmp_path):
    run = str(tmp_path)
    Attempt(run, 0, job_id=1, restarts=0, nodes=("n1",)).update()
    with pytest.raises(TryAgainError, match="no drain runs"):
        people.cancel_drain(run, timeout_s=1.0)
    DrainStatus(iteration=40, attempt=0, started_s=5.0, cap_bytes_s=7.0).write(run)
    with pytest.raises(TryAgainError, match="resil-drain-40"):
        people.cancel_drain(run, timeout_s=0.5)
    assert Orders.read(run, 40) == Orders(iteration=40, cap_bytes_s=7.0, cancel=True)
    end = threading.Timer(0.5, DrainStatus(iteration=40, attempt=0, started_s=5.0, state="cancelled").write, (run,))
    end.start()
    assert people.cancel_drain(run, timeout_s=20.0).state == "cancelled"
    end.join()
    assert Orders.read(run, 40) is None
    with pytest.raises(TryAgainError, match="the last one, of iteration 40, is cancelled"):
        people.cancel_drain(run, timeout_s=1.0)
