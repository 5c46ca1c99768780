"""What the leader asks its host to rebuild, and the plan that it makes then."""

from __future__ import annotations

from pathlib import Path

from slurm_resil.agent.protocol import Loaded, Plan, Survey
from slurm_resil.agent.restoring import Restoring
from slurm_resil.core import paths


def restoring(path: Path, *, durable: tuple[int, ...] = (), rebuilds: bool = True) -> Restoring:
    """Three nodes with two ranks each."""
    for iteration in durable:
        Path(paths.drained_manifest(str(path), iteration)).write_text('{"attempt": 0}')
    return Restoring(str(path), 3, 2, rebuilds=rebuilds)


def see(made: Restoring, place: int, shards: tuple[int, ...], encoded: tuple[int, ...], attempt: int = 0) -> None:
    ranks = (2 * place, 2 * place + 1)
    found = [(one, rank, attempt) for one in shards for rank in ranks]
    made.survey(place, Survey(cycle=0, shards=found, encoded=list(encoded)))


def plan(made: Restoring) -> Plan:
    assert made.rebuild() is None
    found = made.make(0)
    assert found is not None
    return found


def test_a_node_that_lacks_shards_gets_them_before_a_plan_is_made(tmp_path: Path) -> None:
    made = restoring(tmp_path, durable=(10,))
    for place in (0, 2):
        see(made, place, (30, 20), (20,))
    assert made.rebuild() is None  # node 1 has not said anything yet
    see(made, 1, (), ())
    assert made.rebuild() == (20, [1])
    assert made.make(0) is None
    assert made.rebuild() is None  # it is at it
    see(made, 1, (30,), ())  # late news of before
    assert made.make(0) is None
    assert made.rebuilt(20, ok=True)
    for place in range(3):
        assert made.make(0) is None
        see(made, place, (30, 20) if place != 1 else (20,), (20,))
    found = plan(made)
    assert (found.iteration, found.sources) == (20, ["local"] * 6)
    assert (found.complete, found.protected, found.durable) == (20, 20, 10)


def test_a_rebuild_that_fails_leads_to_the_next_older_one_and_then_to_the_drained_one(tmp_path: Path) -> None:
    made = restoring(tmp_path, durable=(10,))
    for place in (0, 2):
        see(made, place, (30, 20, 5), (30, 20, 5))
    see(made, 1, (), ())
    assert made.rebuild() == (30, [1])
    assert not made.rebuilt(40, ok=True)  # of another time
    assert not made.rebuilt(30, ok=False)
    assert made.rebuild() == (20, [1])
    assert not made.rebuilt(20, ok=False)
    found = plan(made)  # 5 is older than what is durable
    assert (found.iteration, found.protected, found.durable) == (10, 0, 10)
    made.start()  # another cycle may try again: a node may have come back
    for place in (0, 2):
        see(made, place, (30,), (30,))
    see(made, 1, (), ())
    assert made.rebuild() == (30, [1])


def test_nothing_is_rebuilt_that_all_have_or_nobody_has_or_that_the_host_cannot(tmp_path: Path) -> None:
    made = restoring(tmp_path)
    for place in range(3):
        see(made, place, (20,), (20, 30))  # of 30 there are no shards at all
    found = plan(made)
    assert (found.iteration, found.protected) == (20, 20)
    made = restoring(tmp_path, rebuilds=False)
    for place in (0, 2):
        see(made, place, (20,), (20,))
    see(made, 1, (), ())
    assert plan(made).iteration == 0


def test_shards_of_an_older_attempt_do_not_count(tmp_path: Path) -> None:
    made = restoring(tmp_path)
    for place in (0, 2):
        see(made, place, (20,), (20,), attempt=2)
    see(made, 1, (20,), (20,), attempt=0)  # a node that was away
    assert made.rebuild() == (20, [1])


def test_part_of_the_redundancy_is_not_called_protected(tmp_path: Path) -> None:
    made = restoring(tmp_path)
    for place in range(3):
        see(made, place, (30, 20), (20, 30) if place else (20,))
    found = plan(made)
    assert (found.iteration, found.complete, found.protected) == (30, 30, 20)


def test_a_shard_that_turns_out_bad_is_rebuilt_and_is_then_as_good_as_new(tmp_path: Path) -> None:
    made = restoring(tmp_path, durable=(10,))
    for place in range(3):
        see(made, place, (20,), (20,))
    first = plan(made)
    assert first.iteration == 20
    made.refuse(Loaded(plan=first.number, rank=3, outcome="bad", reason="flipped"))
    assert made.may_rebuild(20)
    assert made.lost == [(20, 3, "flipped")]
    made.look_again()
    assert made.rebuild() is None
    for place in range(3):
        see(made, place, (20,) if place != 1 else (), (20,))
    assert made.rebuild() == (20, [1])
    assert made.rebuilt(20, ok=True)
    assert made.lost == []
    for place in range(3):
        see(made, place, (20,), (20,))
    again = plan(made)
    assert (again.iteration, again.sources, again.number) == (20, ["local"] * 6, first.number + 1)
    made.refuse(Loaded(plan=again.number, rank=3, outcome="bad", reason="flipped"))
    assert not made.may_rebuild(20)  # once in a cycle
    assert plan(made).iteration == 10
