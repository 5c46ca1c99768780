from __future__ import annotations

import pytest

from slurm_resil.agent.agreement import VOTE_WAIT_S, Agreement, Progress


def nodes(*newest: int, rate: float = 0.0, at: float = 0.0) -> dict[int, Progress]:
    return {place: Progress(newest=one, rate=rate, at=at) for place, one in enumerate(newest)}


def test_all_yes_commits_and_not_earlier() -> None:
    agreement = Agreement(epoch=7)
    proposal = agreement.propose(nodes(3, 5, 4), 0.0, stop=True, deadline_s=99.0)
    assert (proposal.epoch, proposal.stop, proposal.deadline_s) == (7, True, 99.0)
    assert proposal.iteration == 6
    assert agreement.vote(0, 7, yes=True, newest=3, now=0.01) is None
    assert agreement.vote(0, 7, yes=True, newest=3, now=0.01) is None  # twice is once
    assert agreement.vote(1, 7, yes=True, newest=5, now=0.01) is None
    verdict = agreement.vote(2, 7, yes=True, newest=5, now=0.01)
    assert verdict is not None
    assert verdict.commit
    assert agreement.open is None


def test_one_no_aborts_and_the_next_is_higher() -> None:
    agreement = Agreement()
    first = agreement.propose(nodes(3, 3), 0.0, stop=False)
    verdict = agreement.vote(1, first.epoch, yes=False, newest=9, now=0.01)
    assert verdict is not None
    assert not verdict.commit
    assert "node 1 is at iteration 9" in verdict.why
    assert agreement.vote(0, first.epoch, yes=True, newest=3, now=0.01) is None  # too late
    second = agreement.propose(nodes(3, 3), 0.02, stop=False)
    assert second.epoch > first.epoch
    assert second.iteration > 9


def test_old_epochs_do_not_count() -> None:
    agreement = Agreement()
    first = agreement.propose(nodes(1), 0.0, stop=False)
    agreement.abort("for the test")
    second = agreement.propose(nodes(1), 0.0, stop=False)
    assert agreement.vote(0, first.epoch, yes=True, newest=1, now=0.0) is None
    assert agreement.open == second


def test_silence_and_loss_are_a_no() -> None:
    agreement = Agreement()
    agreement.propose(nodes(1, 1), 0.0, stop=False)
    assert agreement.tick(VOTE_WAIT_S - 0.1) is None
    verdict = agreement.tick(VOTE_WAIT_S)
    assert verdict is not None
    assert not verdict.commit
    assert "node 0, 1" in verdict.why
    agreement.propose(nodes(1, 1), 10.0, stop=False)
    verdict = agreement.lost(1)
    assert verdict is not None
    assert not verdict.commit
    assert agreement.lost(1) is None


def test_the_margin_follows_rate_and_round_trip() -> None:
    agreement = Agreement()
    slow = agreement.target(nodes(100, rate=0.1).values(), 0.0)
    fast = agreement.target(nodes(100, rate=1000.0).values(), 0.0)
    assert slow == 102
    assert fast == 201  # a tenth of a second ahead
    # news of half a second ago
    assert agreement.target(nodes(100, rate=1000.0).values(), 0.5) == fast + 500


def test_every_refusal_doubles_the_margin_and_a_commit_resets_it() -> None:
    agreement = Agreement()
    now, newest, targets = 0.0, 100, []
    for _ in range(4):
        proposal = agreement.propose(nodes(newest, rate=1000.0, at=now), now, stop=False)
        targets.append(proposal.iteration - newest)
        newest = proposal.iteration
        agreement.vote(0, proposal.epoch, yes=False, newest=proposal.iteration, now=now + 0.1)
    assert targets == [101, 201, 401, 801]
    proposal = agreement.propose(nodes(100, rate=1000.0), now, stop=False)
    verdict = agreement.vote(0, proposal.epoch, yes=True, newest=100, now=now + 0.1)
    assert verdict is not None
    assert verdict.commit
    assert agreement.target(nodes(newest, rate=1000.0).values(), now) == newest + 101


def test_a_slow_round_widens_the_margin() -> None:
    agreement = Agreement()
    proposal = agreement.propose(nodes(0, rate=100.0), 0.0, stop=False)
    agreement.vote(0, proposal.epoch, yes=True, newest=0, now=2.0)
    assert agreement.target(nodes(0, rate=100.0).values(), 0.0) == pytest.approx(201, abs=1)


def test_epochs_stay_above_what_is_known() -> None:
    agreement = Agreement(epoch=5)
    agreement.raise_epoch(40)
    assert agreement.propose(nodes(1), 0.0, stop=False).epoch == 41


def test_a_no_of_a_node_that_is_busy_is_not_a_reason_to_go_higher() -> None:
    agreement = Agreement()
    proposal = agreement.propose(nodes(100, rate=10.0), 0.0, stop=False)
    verdict = agreement.vote(0, proposal.epoch, yes=False, newest=100, now=0.1)
    assert verdict is not None
    assert (verdict.commit, verdict.too_low) == (False, False)
    assert agreement.target(nodes(100, rate=10.0).values(), 0.0) == proposal.iteration
