"""Leader, agents and slots in every order of what can happen: nothing announced is lost, nobody saves alone.

The parts are the real ones, see ``world``. After every single event it is checked what a restore would find if
everything died at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import model as m
import pytest
import world as w

from slurm_resil.agent.ballot import Ballot
from slurm_resil.agent.decisions import Decisions
from slurm_resil.agent.desk import Desk
from slurm_resil.agent.keeping import Keeping
from slurm_resil.agent.leader import Leader
from slurm_resil.agent.protocol import Propose, Vote
from slurm_resil.agent.restoring import Restoring
from slurm_resil.agent.saves import Saves
from slurm_resil.agent.slots import Slots
from slurm_resil.core import control as c

CADENCE = m.Bounds(iterations=4, warm=2)  # the slots are in use when it begins
THREE = m.Bounds(iterations=5, warm=3, slots=3)
NOTICE = m.Bounds(every=0, notices=1, iterations=3)
RACE = m.Bounds(every=0, notices=1, iterations=2, buffered=True)
# the three that were saved before it begins are encoded
ENCODE = m.Bounds(iterations=6, warm=3, slots=3, deaths=(("encode", 6),))
ENCODE_TWO = m.replace(ENCODE, iterations=5, slots=2)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with m.replaced() as made:
        yield made


def dying(bounds: m.Bounds, **deaths: int) -> m.Bounds:
    return m.replace(bounds, deaths=tuple((dict(bounds.deaths) | deaths).items()))


WORLDS = {
    "cadence, two slots": CADENCE,
    "cadence, three slots": THREE,
    "cadence, a seal fails": dying(CADENCE, io=1),
    "cadence, somebody reads": dying(CADENCE, pin=1),
    "cadence, a rank dies": dying(CADENCE, rank=1),
    "cadence, an agent dies": dying(CADENCE, agent=1),
    "cadence, the leader dies": dying(CADENCE, leader=1),
    "cadence, a node is lost": dying(CADENCE, node=1),
    "cadence, three slots, an agent dies": dying(THREE, agent=1),
    "notice, stores are late": RACE,
    "notice, ranks do not wait": dying(NOTICE, slow=1),
    "notice, a rank dies": dying(NOTICE, rank=1),
    "notice, an agent dies": dying(NOTICE, agent=1),
    "notice, the leader dies": dying(NOTICE, leader=1),
    "notice, leader and agent die": dying(NOTICE, leader=1, agent=1),
    "encode, three slots": ENCODE,
    "encode, two slots": ENCODE_TWO,
    "encode, two slots, not the newest": dying(ENCODE_TWO, encode=4),
    "encode, it stops": dying(ENCODE, stop=2),
    "encode, two slots, it stops": dying(ENCODE_TWO, stop=1),
    "encode, somebody reads": dying(ENCODE, pin=1),
    "encode, and drain": dying(ENCODE, drain=1),
    "encode, a rank dies": dying(ENCODE, rank=1),
    "encode, an agent dies": dying(ENCODE, agent=1),
    "encode, a node is lost": dying(ENCODE, node=1),
    "notice, two ranks on a node": m.replace(NOTICE, nodes=1, per_node=2, iterations=2),
}
WHOLE = {"cadence, two slots", "cadence, three slots", "notice, two ranks on a node"}


@pytest.mark.parametrize("name", list(WORLDS))
@pytest.mark.usefixtures("patch")
def test_what_must_hold_holds(name: str) -> None:
    """Small worlds as a whole, of others a part that is taken by chance; all of them in the long campaign."""
    found = m.explore(WORLDS[name]) if name in WHOLE else m.explore(WORLDS[name], most=500, enough_s=20)
    print(f"{name}: {found}")
    assert found.all == (name in WHOLE)
    assert found.states >= 50


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(WORLDS))
@pytest.mark.usefixtures("patch")
def test_what_must_hold_holds_everywhere(name: str) -> None:
    found = m.explore(WORLDS[name], enough_s=1200)
    print(f"{name}: {found}")
    assert found.ends


# what must be found out: each is one rule less


def all_but(iteration: int, desk: Desk) -> bool:
    return iteration <= max(desk.sealed_all, desk.keeping.restored)


class Blind(Ballot):
    """Says yes to everything."""

    def consider(self, propose: Propose) -> Vote:
        vote = super().consider(propose)
        if not vote.yes:
            self._words[c.PROPOSAL], self._words[c.DECISION] = propose.iteration, c.OPEN
        return Vote(epoch=vote.epoch, yes=True, newest=vote.newest)


def the_newest_is_given_away(patch: pytest.MonkeyPatch) -> m.Bounds:
    patch.setattr(Desk, "_expendable", lambda self, *_, **__: lambda iteration: all_but(iteration, self))
    return CADENCE


def what_is_incomplete_is_given_away(patch: pytest.MonkeyPatch) -> m.Bounds:
    patch.setattr(Desk, "_expendable", lambda self, *_, **__: lambda iteration: iteration != self.sealed_all)
    return m.replace(THREE, iterations=6)


def a_slot_is_given_to_two(patch: pytest.MonkeyPatch) -> m.Bounds:
    def lease(self: Slots, iteration: int, expendable: Callable[[int], bool], *, last_try: bool = True) -> int:
        self._slots[0].iteration = iteration
        return 0

    patch.setattr(w.Slots, "lease", lease)
    return m.Bounds(iterations=3)


def pins_do_not_count(patch: pytest.MonkeyPatch) -> m.Bounds:
    def evict(self: w.Slots, iteration: int) -> bool:
        # the manifest is left for the check to see it
        return True

    patch.setattr(w.Slots, "_evict", evict)
    return dying(CADENCE, pin=1)


def nothing_given_up(keeping: Keeping) -> Keeping:
    keeping.given_up.clear()
    return keeping


def nobody_hears_what_was_given_up(patch: pytest.MonkeyPatch) -> m.Bounds:
    real = Keeping.expendable
    patch.setattr(Keeping, "expendable", lambda self, *a, **k: real(nothing_given_up(self), *a, **k))
    return dying(CADENCE, io=1)


def nobody_looks_whether_all_are_below(patch: pytest.MonkeyPatch) -> m.Bounds:
    patch.setattr(w.agents, "Ballot", Blind)
    return m.replace(RACE, nodes=1, per_node=2)


def there_is_no_barrier(patch: pytest.MonkeyPatch) -> m.Bounds:
    patch.setattr(m.World, "fence", lambda self: None)
    return m.replace(RACE, nodes=1, per_node=2)


def a_new_cycle_knows_what_the_old_one_knew(patch: pytest.MonkeyPatch) -> m.Bounds:
    real = Leader._start_cycle

    def start_cycle(self: Leader, cycle: int) -> None:
        saves = self._saves
        real(self, cycle)
        self._saves = saves

    patch.setattr(Leader, "_start_cycle", start_cycle)
    return dying(m.replace(CADENCE, iterations=3), node=1)


def the_protected_one_is_given_away(patch: pytest.MonkeyPatch) -> m.Bounds:
    real = Keeping.expendable

    def expendable(self: Keeping, iteration: int, encoded: Collection[int], *, tight: bool = False) -> bool:
        return iteration == self.protected < self.sealed_all or real(self, iteration, encoded, tight=tight)

    patch.setattr(Keeping, "expendable", expendable)
    return ENCODE


def what_has_redundancy_here_is_given_away(patch: pytest.MonkeyPatch) -> m.Bounds:
    real = Keeping.expendable

    def expendable(self: Keeping, iteration: int, encoded: Collection[int], *, tight: bool = False) -> bool:
        return real(self, iteration, (), tight=tight)

    patch.setattr(Keeping, "expendable", expendable)
    return ENCODE


def nobody_hears_what_will_not_be_protected(patch: pytest.MonkeyPatch) -> m.Bounds:
    patch.setattr(Keeping, "is_unprotected", lambda self, iteration: None)
    return dying(ENCODE_TWO, stop=1)


def a_plan_does_not_say_what_is_protected(patch: pytest.MonkeyPatch) -> m.Bounds:
    patch.setattr(Restoring, "_protected", lambda self, choice: 0)
    return dying(ENCODE, rank=1, encode=2)


def one_seal_is_enough(patch: pytest.MonkeyPatch) -> m.Bounds:
    patch.setattr(Saves, "sealed", lambda self, iteration, *_: self.complete(iteration))
    return m.Bounds(iterations=2)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (the_newest_is_given_away, "was announced"),
        (what_is_incomplete_is_given_away, "was announced"),
        (a_slot_is_given_to_two, "overwritten|at a time"),
        (pins_do_not_count, "overwritten|while it is read"),
        (nobody_hears_what_was_given_up, "no save works any more"),
        (nobody_looks_whether_all_are_below, "is saved at"),
        (there_is_no_barrier, "is saved at"),
        (a_new_cycle_knows_what_the_old_one_knew, "is sealed"),
        (one_seal_is_enough, "was announced"),
        (the_protected_one_is_given_away, "is protected, and node"),
        (what_has_redundancy_here_is_given_away, "is protected, and node"),
        (nobody_hears_what_will_not_be_protected, "no save works any more"),
        (a_plan_does_not_say_what_is_protected, "is protected, and node"),
    ],
)
def test_one_rule_less_is_found_out(
    patch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], m.Bounds], words: str
) -> None:
    bounds = broken(patch)
    with pytest.raises(m.ViolationError, match=words):
        m.explore(bounds, enough_s=50)


# ways that are worth to be gone every time


def world(bounds: m.Bounds) -> m.World:
    made = m.World(m.replace(bounds, deaths=tuple(dict.fromkeys(["agent", "leader", "io"], 9).items())))
    made.start()
    return made


def let(made: m.World, *first: object) -> None:
    """Do what begins like this and can be done."""
    made.do(next(event for event in made.events() if event[: len(first)] == first))


def save(made: m.World, rank: int) -> None:
    """A rank writes its next shard, and it is sealed; nobody has heard of that yet."""
    let(made, "step", rank)
    let(made, "step", rank)
    let(made, "hash", rank)
    let(made, "turn", rank)


def committed_at_one_node(made: m.World) -> None:
    """The leader has committed and told it to one of two agents when it dies."""
    made.do(("notice",))
    let(made, "down", 0)
    let(made, "down", 1)
    let(made, "up", 0)
    let(made, "up", 1)
    let(made, "down", 0)
    assert [page.words[c.DECISION] for page in made.pages if page is not None] == [c.COMMIT, c.OPEN]
    made.do(("leader dies", 1))


@pytest.mark.usefixtures("patch")
def test_what_one_node_has_heard_the_others_do_too() -> None:
    made = world(NOTICE)
    committed_at_one_node(made)
    made.settle()
    assert [page.words[c.DECISION] for page in made.pages if page is not None] == [c.COMMIT] * 2


def test_decisions_that_are_not_on_record_are_found_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Decisions, "record", lambda self, decide, **_: decide)
    made = world(NOTICE)
    committed_at_one_node(made)
    with pytest.raises(m.ViolationError, match="committed here and aborted there"):
        made.settle()


@pytest.mark.usefixtures("patch")
def test_an_agent_that_was_away_hears_what_was_given_up() -> None:
    made = world(CADENCE)
    made.agents[0]._channel.close()
    save(made, 0)
    let(made, "step", 1)
    let(made, "step", 1)
    made.do(("fails", 1))
    let(made, "turn", 1)
    while any(event[0] == "up" for event in made.events()):
        let(made, "up")
    made.settle()
    assert made.agents[0]._desk.keeping.given_up == {3}


@pytest.mark.usefixtures("patch")
def test_a_new_leader_tells_all_what_one_agent_knows() -> None:
    made = world(CADENCE)
    for rank in (0, 1):
        save(made, rank)
    while made.told.announced < 3:
        let(made, "up")
    let(made, "down", 0)
    assert [agent._desk.sealed_all for agent in made.agents] == [3, 2]
    made.do(("leader dies", 1))
    let(made, "leader starts")
    let(made, "closed", 1)
    let(made, "connect", 1)
    while any(event[0] == "up" for event in made.events()):
        let(made, "up")
    made.settle()
    assert [agent._desk.sealed_all for agent in made.agents] == [3, 3]


@pytest.mark.usefixtures("patch")
def test_the_leader_hears_of_a_shard_whose_agent_died_before_it_could_say_so() -> None:
    made = world(CADENCE)
    save(made, 0)
    made.do(("agent dies", 0, True))
    let(made, "agent starts", 0)
    save(made, 1)
    made.settle()
    assert made.told.announced == 3


@pytest.mark.usefixtures("patch")
def test_a_shard_that_is_sealed_is_not_put_at_risk_again() -> None:
    """The agent has told the leader and dies before it tells the rank, which hands the shard over again."""
    made = world(CADENCE)
    pending = {}
    for rank in made.ranks:
        let(made, "step", rank.rank)
        let(made, "step", rank.rank)
        pending[rank.rank] = dict(rank.pending)
    made.settle()
    assert made.told.announced == 3
    made.do(("agent dies", 1, False))
    made.ranks[1].pending = pending[1]
    let(made, "agent starts", 1)
    let(made, "reconnect", 1)
    assert not made.agents[1]._desk._pool.jobs
    assert not made.ranks[1].pending
    made.settle()
    assert made.restorable() == 3
