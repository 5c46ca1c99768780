from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resil.agent.protocol import OTHER_WORLD, Loaded, Outcome, Survey
from slurm_resil.agent.restoring import Restoring
from slurm_resil.agent.survey import DRAINED, SHARDS, choose, drained_iterations
from slurm_resil.core import paths


def pick(shards: dict[int, set[int]], durable: set[int], bad: set[tuple[int, int]] | None = None, world: int = 2):  # type: ignore[no-untyped-def]
    written = {rank: dict.fromkeys(found, 0) for rank, found in shards.items()}
    choice = choose(written, durable, bad or set(), world, drained_by=lambda _: 0)
    return choice.iteration, choice.sources, choice.complete


@pytest.mark.parametrize(
    ("shards", "durable", "bad", "expected"),
    [
        ({}, set(), set(), (0, ("fresh", "fresh"), 0)),
        ({0: {5}, 1: {5}}, set(), set(), (5, ("local", "local"), 5)),
        # the newest that all have, not the newest that one has
        ({0: {5, 10}, 1: {5}}, set(), set(), (5, ("local", "local"), 5)),
        # a lost node: the drained file for its ranks, the shards for the others
        ({0: {5, 10}, 1: set()}, {5}, set(), (5, ("local", "drained"), 0)),
        ({0: {5}}, {5}, set(), (5, ("local", "drained"), 0)),
        # durable and newer than what is complete here
        ({0: {5}, 1: {5}}, {5, 8}, set(), (8, ("drained", "drained"), 5)),
        # bad ones
        ({0: {5, 10}, 1: {5, 10}}, set(), {(10, 1)}, (5, ("local", "local"), 5)),
        ({0: {5, 10}, 1: {5, 10}}, {10}, {(10, 1)}, (10, ("local", "drained"), 5)),
        ({0: {5}, 1: {5}}, {8}, {(8, DRAINED)}, (5, ("local", "local"), 5)),
        ({0: {5}}, {5}, {(5, DRAINED)}, (0, ("fresh", "fresh"), 0)),
    ],
)
def test_choice(shards, durable, bad, expected) -> None:  # type: ignore[no-untyped-def]
    assert pick(shards, durable, bad) == expected


@pytest.mark.parametrize(
    ("shards", "durable", "whole", "bad", "expected"),
    [
        ({}, set(), {5}, set(), (5, ("shards", "shards"), 0)),
        ({}, {5}, {5}, set(), (5, ("shards", "shards"), 0)),  # the same, and nearer
        ({}, {7}, {5}, set(), (7, ("drained", "drained"), 0)),
        ({0: {5, 3}, 1: {5, 3}}, set(), {4}, set(), (5, ("local", "local"), 5)),
        ({0: {3}, 1: {3}}, set(), {3, 4}, set(), (4, ("shards", "shards"), 3)),
        ({}, {5}, {5}, {(5, SHARDS)}, (5, ("drained", "drained"), 0)),
        ({}, set(), {5, 4}, {(5, SHARDS)}, (4, ("shards", "shards"), 0)),
        ({}, set(), {5}, {(5, DRAINED), (5, 0)}, (5, ("shards", "shards"), 0)),
    ],
)
def test_shards_of_another_number_of_ranks(shards, durable, whole, bad, expected) -> None:  # type: ignore[no-untyped-def]
    written = {rank: dict.fromkeys(found, 0) for rank, found in shards.items()}
    choice = choose(written, durable, bad, 2, drained_by=lambda _: 0, whole=whole)
    assert (choice.iteration, choice.sources, choice.complete) == expected


@pytest.mark.parametrize("reason", ["flipped", "cannot be read: no permission"])
def test_whole_shards_count_on_one_node_and_are_taken_out_together(tmp_path: Path, reason: str) -> None:
    several = Restoring(str(tmp_path), nodes=2, ranks_per_node=1)
    for place in (0, 1):
        several.survey(place, Survey(cycle=0, shards=[], whole=[9]))
    plan = several.make(0)
    assert plan is not None and plan.iteration == 0
    one = Restoring(str(tmp_path), nodes=1, ranks_per_node=2)
    one.survey(0, Survey(cycle=0, shards=[], passed_over=[(3, 0, "is not used: for a reason")], whole=[9, 7]))
    plan = one.make(0)
    assert plan is not None and (plan.iteration, plan.sources) == (9, ["shards", "shards"])
    assert {entry.instead for entry in one.set_aside(plan)} == {"iteration 9 from the burst buffer"}
    one.refuse(Loaded(plan=plan.number, rank=1, outcome="bad", reason=reason))
    plan = one.make(0)
    assert plan is not None and plan.iteration == 7
    assert plan.lost == ([(9, SHARDS, reason)] if reason == "flipped" else [])  # nothing is known to be bad


def test_shards_of_several_attempts_are_never_mixed() -> None:
    """A node that was lost comes back with a shard of the first time that the run came to this iteration."""

    def take(durable: set[int], drained_by: int | None) -> tuple[int, tuple[str, ...]]:
        shards = {0: {40: 3, 20: 0}, 1: {40: 1, 20: 0}}
        choice = choose(shards, durable, set(), 2, drained_by=lambda _: drained_by)
        assert choice.complete == 20
        return choice.iteration, choice.sources

    assert take(set(), None) == (20, ("local", "local"))
    assert take({40}, 3) == (40, ("local", "drained"))
    assert take({40}, 1) == (40, ("drained", "local"))
    assert take({40}, 2) == take({40}, None) == (40, ("drained", "drained"))


def test_what_another_number_of_ranks_has_saved_is_not_given_up_for_a_start_from_nothing(tmp_path: Path) -> None:
    words = f"is not used: x is of 2{OTHER_WORLD}1"
    restoring = Restoring(str(tmp_path), nodes=1, ranks_per_node=1)
    restoring.survey(0, Survey(cycle=0, shards=[], passed_over=[(90, 0, words)]))
    plan = restoring.make(0)
    assert plan is not None
    assert plan.final
    assert plan.error == f"x is of 2{OTHER_WORLD}1: start as many, or another run (--run-id)"
    (tmp_path / "ckpt-0000000020.json").write_text("{}")
    restoring.start()
    restoring.survey(0, Survey(cycle=0, shards=[], passed_over=[(90, 0, words)]))
    plan = restoring.make(0)
    assert plan is not None
    assert (plan.iteration, plan.error) == (20, "")
    assert {entry.instead for entry in restoring.set_aside(plan)} == {f"iteration 20 from {tmp_path}"}


def test_a_plan_needs_all_nodes_and_counts_only_shards_in_their_place(tmp_path: Path) -> None:
    restoring = Restoring(str(tmp_path), nodes=2, ranks_per_node=1)
    restoring.survey(0, Survey(cycle=0, shards=[(5, 0, 0), (5, 1, 0)]))  # rank 1 is not placed there
    assert restoring.make(0) is None
    restoring.survey(1, Survey(cycle=0, shards=[(4, 1, 0)]))
    plan = restoring.make(0)
    assert plan is not None
    assert (plan.iteration, plan.number) == (0, 1)
    assert restoring.make(0) is None  # once
    assert not restoring.loaded(0)
    assert not restoring.loaded(0)
    assert restoring.loaded(1)
    assert restoring.going


def test_no_artefact_is_tried_twice_not_even_in_the_next_cycle(tmp_path: Path) -> None:
    for iteration in (3, 9):
        Path(paths.drained_manifest(str(tmp_path), iteration)).write_text("{}")
    restoring = Restoring(str(tmp_path), nodes=1, ranks_per_node=1)
    restoring.survey(0, Survey(cycle=0, shards=[(9, 0, 0), (3, 0, 0)]))
    plan = restoring.make(0)
    assert plan is not None
    assert (plan.iteration, plan.sources) == (9, ["local"])
    tried = []
    while plan is not None:
        tried.append((plan.iteration, plan.sources[0]))
        if plan.sources[0] == "fresh":
            break
        restoring.refuse(Loaded(plan=plan.number, rank=0, outcome="bad", reason="flipped"))
        number, plan = plan.number, restoring.make(0)
        assert plan is not None
        assert plan.number > number
    assert tried == [(9, "local"), (9, "drained"), (3, "local"), (3, "drained"), (0, "fresh")]
    assert drained_iterations(str(tmp_path)) == set()
    assert sorted(name.name for name in tmp_path.iterdir()) == ["ckpt-0000000003.bad", "ckpt-0000000009.bad"]
    restoring.start()
    restoring.survey(0, Survey(cycle=0, shards=[(9, 0, 0)]))
    plan = restoring.make(1)
    assert plan is not None
    assert plan.iteration == 0


def test_what_cannot_be_read_is_no_fresh_start(tmp_path: Path) -> None:
    restoring = Restoring(str(tmp_path / "gone"), nodes=1, ranks_per_node=1)
    restoring.survey(0, Survey(cycle=0, shards=[]))
    plan = restoring.make(0)
    assert plan is not None
    assert "cannot read" in plan.error


@pytest.mark.parametrize("outcome", ["error", "unfit"])
def test_an_error_of_one_rank_is_told_to_all(tmp_path: Path, outcome: Outcome) -> None:
    restoring = Restoring(str(tmp_path), nodes=1, ranks_per_node=2)
    restoring.survey(0, Survey(cycle=0, shards=[(9, 0, 0), (9, 1, 0)]))
    restoring.make(0)
    restoring.refuse(Loaded(plan=1, rank=1, outcome=outcome, reason="StateError: another model"))
    plan = restoring.make(0)
    assert plan is not None
    assert (plan.error, plan.final) == ("rank 1 cannot load its part, and says why", outcome == "unfit")
    assert restoring.failed is not None and restoring.failed.reason == "StateError: another model"
    assert list(tmp_path.iterdir()) == []
