from __future__ import annotations

from slurm_resil.agent.saves import Saves


def test_complete_means_all_ranks_and_is_said_once() -> None:
    saves = Saves(2)
    assert not saves.sealed(10, 0, 0.0)
    assert not saves.sealed(10, 0, 0.0)
    assert saves.since(10) == 0.0
    assert saves.sealed(10, 1, 1.0)
    assert not saves.sealed(10, 1, 1.0)
    assert saves.newest == 10
    assert not saves.sealed(10, 2, 1.0)  # there is no rank 2
    assert not saves.sealed(20, -1, 1.0)


def test_what_was_given_up_never_becomes_complete() -> None:
    saves = Saves(2)
    saves.sealed(10, 0, 0.0)
    assert saves.failed(10)
    assert not saves.failed(10)
    assert not saves.sealed(10, 0, 0.0)
    assert not saves.sealed(10, 1, 0.0)
    assert saves.newest == 0
    assert saves.has_failed(10)
    assert not Saves(2, newest=10).failed(10)  # too late


def test_what_is_older_than_a_complete_one_is_forgotten() -> None:
    saves = Saves(2)
    saves.sealed(10, 0, 0.0)
    saves.sealed(20, 0, 0.0)
    assert saves.sealed(20, 1, 0.0)
    assert saves.overdue(1e9, 1.0) == []
    assert not saves.sealed(10, 1, 0.0)
    assert saves.newest == 20


def test_overdue() -> None:
    saves = Saves(2)
    saves.sealed(10, 0, 5.0)
    assert saves.overdue(14.0, 10.0) == []
    assert saves.overdue(15.0, 10.0) == [10]
