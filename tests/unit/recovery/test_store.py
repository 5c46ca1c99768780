"""One incident per restart of a job, and everything there again after the database was closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resil.core.errors import DataError
from slurm_resil.recovery.store import Store


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "engine.db")


@pytest.fixture
def store(path: str) -> Iterator[Store]:
    made = Store(path)
    yield made
    made.close()


def ask(store: Store, **fields: Any) -> Any:
    common: dict[str, Any] = {"job": 7, "uid": 1001, "restarts": 0, "bad": ("n3",), "good": ("n1", "n2")}
    common |= {"reason": "node_loss", "level": "durable"}
    return store.open(**(common | fields))


def test_a_second_ask_for_the_same_restart_is_the_first_one(store: Store) -> None:
    first, new = ask(store)
    again, second = ask(store, bad=("n1",), good=(), reason="other", uid=5)
    assert (new, second) == (True, False)
    assert again == first
    assert len(store.incidents()) == 1


def test_also_when_it_is_over(store: Store) -> None:
    first, _ = ask(store)
    store.end(first.id, "running on n[1-2,4]")
    again, new = ask(store)
    assert not new
    assert again.outcome == "running on n[1-2,4]"
    assert again.ended_s is not None


def test_what_has_ended_can_be_begun_once_more_and_counts(store: Store) -> None:
    first, _ = ask(store)
    assert store.reopen(first, bad=(), good=()) == (first, False)  # still going on
    store.spares(first.id, ("n4",))
    store.end(first.id, "failed: no answer")
    again, begun = store.reopen(first, bad=("n1",), good=("n2", "n3"))
    assert begun
    assert (again.id, again.tries, again.outcome, again.ended_s) == (first.id, 2, "", None)
    assert (again.bad, again.good, again.spare) == (("n1",), ("n2", "n3"), ())
    assert store.reopen(first, bad=(), good=()) == (again, False)


def test_registered_jobs_outlive_the_engine(path: str) -> None:
    store = Store(path)
    store.register(7, 1001, ("n1", "n2"))
    store.register(8, 1002, ("n3",))
    store.register(7, 1001, ("n1", "n4"))
    store.forget(8)
    store.forget(9)
    store.close()
    store = Store(path)
    assert store.registered() == {7: (1001, ("n1", "n4"))}
    store.close()


def test_an_action_is_announced_and_then_finished(store: Store) -> None:
    first, _ = ask(store)
    line = store.audit(first.id, "requeuehold 7", "begun")
    store.audit(first.id, "hold 7", "begun")
    store.finish(line, "done")
    assert [entry["result"] for entry in store.trail(first.id)] == ["done", "begun"]


def test_another_restart_and_another_job_are_others(store: Store) -> None:
    assert [ask(store)[1], ask(store, restarts=1)[1], ask(store, job=8)[1]] == [True] * 3
    assert [entry.restarts for entry in store.incidents(job=7)] == [0, 1]
    assert [entry.job for entry in store.incidents()] == [7, 7, 8]


def test_all_is_there_after_it_was_opened_again(path: str) -> None:
    store = Store(path)
    first, _ = ask(store)
    store.spares(first.id, ("n4",))
    store.audit(first.id, "update NodeName=n3 State=DRAIN", "done")
    store.audit(first.id, "requeuehold 7", "failed: no answer")
    store.close()
    store = Store(path)
    try:
        [found] = store.incidents()
        assert (found.bad, found.good, found.spare, found.outcome) == (("n3",), ("n1", "n2"), ("n4",), "")
        assert ask(store) == (found, False)
        assert [(line["action"], line["result"]) for line in store.trail(found.id)] == [
            ("update NodeName=n3 State=DRAIN", "done"),
            ("requeuehold 7", "failed: no answer"),
        ]
        assert store.trail(found.id + 1) == []
    finally:
        store.close()


def test_many_ask_at_once_and_one_is_new(store: Store) -> None:
    answers: list[tuple[Any, bool]] = []
    ready = threading.Barrier(8)

    def one() -> None:
        ready.wait()
        answers.append(ask(store))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(new for _, new in answers) == [False] * 7 + [True]
    assert {entry.id for entry, _ in answers} == {1}


def test_a_damaged_database_is_not_taken_for_an_empty_one(path: str) -> None:
    Path(path).write_bytes(b"not a database" * 100)
    for readonly in (False, True):
        with pytest.raises(DataError, match=path):
            Store(path, readonly=readonly)


def test_looking_writes_nothing(path: str) -> None:
    Path(path).touch()
    with pytest.raises(DataError):
        Store(path, readonly=True)
    assert Path(path).stat().st_size == 0
    Path(path).unlink()
    store = Store(path)
    looking = Store(path, readonly=True)
    assert looking.incidents() == []
    store.register(7, 1001, ("n1",))
    assert looking.registered() == {7: (1001, ("n1",))}
    store.close()
    looking.close()
    again = Store(path, readonly=True)
    assert again.registered()
    again.close()
