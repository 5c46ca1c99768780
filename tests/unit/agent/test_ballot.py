"""The vote on the control page: against a model of store buffers, in every order of events."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_resil.agent.ballot import Ballot
from slurm_resil.agent.protocol import Decide, Propose
from slurm_resil.agent.seat import NOTHING, Kind, Seat
from slurm_resil.core import control as c
from slurm_resil.core.errors import ServiceError

T = 5


class Memory:
    """Words with a store buffer per side: a store is seen by others only after a flush, as on real processors.

    ``turn`` is called before each access of the agent, so that the rank can do something there.
    """

    def __init__(self) -> None:
        self.words = [0] * (c.HEAD_WORDS + c.BLOCK_WORDS)
        self.agent: dict[int, int] = {}
        self.rank: dict[int, int] = {}
        self.turn: Callable[[], None] = lambda: None

    def __getitem__(self, index: int) -> int:
        self.turn()
        return self.agent.get(index, self.words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self.turn()
        self.agent[index] = value

    def flush(self) -> None:
        for buffer in (self.agent, self.rank):
            for index, value in buffer.items():
                self.words[index] = value
            buffer.clear()


class ModelPage:
    ranks = 1

    def __init__(self) -> None:
        self.words = Memory()

    def block(self, local_rank: int) -> int:
        return c.HEAD_WORDS


def outcome(barrier: Callable[[Memory], None], store_at: int, load_at: int) -> tuple[bool, bool]:
    """(agent said yes, rank saw the proposal) when the rank's store and load at T come before these accesses."""
    page = ModelPage()
    memory = page.words
    ticks = itertools.count()
    seen: list[int] = []

    def turn() -> None:
        now = next(ticks)
        if now == store_at:
            memory.rank[c.HEAD_WORDS + c.ITERATION] = T
        if now == load_at:
            seen.append(memory.words[c.PROPOSAL])

    memory.turn = turn
    ballot = Ballot(page, barrier=lambda: barrier(memory))  # type: ignore[arg-type] # the model
    vote = ballot.consider(Propose(epoch=1, iteration=T, stop=False))
    memory.turn = lambda: None
    memory.flush()
    # what had no turn comes after everything
    return vote.yes, (seen or [memory.words[c.PROPOSAL]]) == [T]


def outcomes(barrier: Callable[[Memory], None]) -> set[tuple[bool, bool]]:
    return {outcome(barrier, *at) for at in itertools.combinations_with_replacement(range(40), 2)}


def test_a_yes_means_that_the_rank_saves_whatever_the_order() -> None:
    found = outcomes(Memory.flush)
    assert (True, False) not in found, "the agent said yes and the rank passed the proposal without seeing it"
    assert (True, True) in found
    assert (False, False) in found  # it had passed: the vote is no


def test_without_the_barrier_the_model_catches_it() -> None:
    assert (True, False) in outcomes(lambda memory: None)


def page_and_seat(tmp_path: Path) -> tuple[c.ControlPage, Ballot, Seat]:
    page = c.ControlPage.create(str(tmp_path / "control"), 1)
    return page, Ballot(page), Seat(page, 0, decision_wait_s=0.2)


def publish(seat: Seat, iteration: int) -> None:
    seat.words[seat.iteration] = iteration


def test_a_rank_at_or_above_makes_it_a_no(tmp_path: Path) -> None:
    page, ballot, seat = page_and_seat(tmp_path)
    for at in (5, 6):
        publish(seat, at)
        vote = ballot.consider(Propose(epoch=at, iteration=5, stop=False))
        assert (vote.yes, vote.newest) == (False, at)
        assert page.words[c.PROPOSAL] == 0
        assert seat.look(at) is NOTHING
    assert ballot.consider(Propose(epoch=9, iteration=7, stop=False)).yes


def test_commit_abort_and_what_the_rank_does(tmp_path: Path) -> None:
    page, ballot, seat = page_and_seat(tmp_path)
    publish(seat, 3)
    proposal = Propose(epoch=10, iteration=5, stop=True, deadline_s=1e9)
    assert ballot.consider(proposal).yes
    assert ballot.voted == 10
    assert seat.stop_asked
    publish(seat, 4)
    assert seat.look(4) is NOTHING
    ballot.decide(Decide(epoch=10, commit=True, iteration=5, stop=True))
    assert ballot.voted == 0
    publish(seat, 5)
    order = seat.look(5)
    assert (order.kind, order.sure) == (Kind.SAVE_AND_STOP, True)
    assert seat.look(5) is NOTHING  # once
    ballot.tidy()
    assert page.words[c.PROPOSAL] == 5  # the rank has not said that it acted
    seat.acted(5)
    ballot.tidy()
    assert page.words[c.PROPOSAL] == 0
    assert ballot.consider(Propose(epoch=11, iteration=9, stop=False)).yes
    ballot.decide(Decide(epoch=11, commit=False, iteration=9, stop=False))
    publish(seat, 9)
    assert seat.look(9) is NOTHING


def test_the_first_step_at_or_above_is_where_all_save(tmp_path: Path) -> None:
    _, ballot, seat = page_and_seat(tmp_path)
    publish(seat, 20)
    assert ballot.consider(Propose(epoch=1, iteration=23, stop=False)).yes
    ballot.decide(Decide(epoch=1, commit=True, iteration=23, stop=False))
    publish(seat, 30)  # this training steps by ten
    assert seat.look(30).kind is Kind.SAVE


def test_an_agent_that_voted_yes_never_decides_alone(tmp_path: Path) -> None:
    page, ballot, _ = page_and_seat(tmp_path)
    assert ballot.consider(Propose(epoch=1, iteration=5, stop=False)).yes
    assert not ballot.consider(Propose(epoch=2, iteration=50, stop=False)).yes
    assert (page.words[c.EPOCH], page.words[c.PROPOSAL], page.words[c.DECISION]) == (1, 5, c.OPEN)
    again = Ballot(page)  # an agent that takes over
    assert (again.voted, again.epoch) == (1, 1)
    again.decide(Decide(epoch=2, commit=True, iteration=50, stop=False))
    assert page.words[c.DECISION] == c.OPEN


def test_what_was_not_voted_for_is_nothing_to_the_next_agent(tmp_path: Path) -> None:
    page, ballot, seat = page_and_seat(tmp_path)
    assert ballot.consider(Propose(epoch=1, iteration=5, stop=False)).yes
    page.words[c.VOTED] = 0  # killed just before
    publish(seat, 5)
    again = Ballot(page)
    again.take_over()
    assert again.voted == 0
    assert seat.look(5) is NOTHING
    assert again.consider(Propose(epoch=2, iteration=6, stop=False)).yes
    Ballot(page).take_over()
    assert page.words[c.PROPOSAL] == 6  # that one was voted for


def test_a_rank_waits_for_a_bounded_time_and_then_saves_unsure(tmp_path: Path) -> None:
    page, ballot, seat = page_and_seat(tmp_path)
    assert ballot.consider(Propose(epoch=1, iteration=5, stop=False)).yes
    publish(seat, 5)
    order = seat.look(5)
    assert (order.kind, order.sure) == (Kind.SAVE, False)
    assert page.words[page.block(0) + c.WAITING] == 0
    publish(seat, 6)
    assert seat.look(6) is NOTHING


def test_what_is_given_up_needs_nothing_more(tmp_path: Path) -> None:
    page, ballot, seat = page_and_seat(tmp_path)
    assert ballot.consider(Propose(epoch=1, iteration=5, stop=False)).yes
    ballot.decide(Decide(epoch=1, commit=True, iteration=5, stop=False))
    ballot.abandon(5)
    publish(seat, 5)
    assert seat.look(5) is NOTHING
    assert seat.given_up == 5
    ballot.sealed_all(7)
    ballot.sealed_all(6)
    assert seat.sealed_all == 7
    assert page.words[c.PROPOSAL] == 0


def test_a_stop_that_cannot_be_saved_is_a_stop_for_late_ranks_too(tmp_path: Path) -> None:
    """One rank has failed before another one came to the iteration: alone it would train on for ever."""
    page, ballot, seat = page_and_seat(tmp_path)
    assert ballot.consider(Propose(epoch=1, iteration=5, stop=True)).yes
    ballot.decide(Decide(epoch=1, commit=True, iteration=5, stop=True))
    publish(seat, 4)
    assert seat.look(4) is NOTHING
    ballot.abandon(5)
    publish(seat, 5)
    assert seat.look(5).kind is Kind.SAVE_AND_STOP
    assert seat.given_up == 5  # nobody waits for it
    seat.acted(5)
    ballot.tidy()
    assert page.words[c.PROPOSAL] == 0


def test_no_barrier_no_yes(tmp_path: Path) -> None:
    page, _, _ = page_and_seat(tmp_path)

    def refuse() -> None:
        raise ServiceError("no membarrier here")

    vote = Ballot(page, barrier=refuse).consider(Propose(epoch=1, iteration=5, stop=False))
    assert not vote.yes
    assert page.words[c.PROPOSAL] == 0


def test_the_kernel_has_both_barriers() -> None:
    assert c.register_barriers()
    c.membarrier()
    c.membarrier(expedited=True)


@pytest.mark.parametrize("words", [[], [c.MAGIC_VALUE, 3]])
def test_a_file_that_is_no_page(tmp_path: Path, words: list[int]) -> None:
    (tmp_path / "x").write_bytes(b"".join(word.to_bytes(8, "little") for word in words).ljust(4096 * len(words), b"\0"))
    with pytest.raises(c.DataError, match="not a control page"):
        c.ControlPage.open(str(tmp_path / "x"))
