"""What the policy does to protect checkpoints: which is encoded when, what is told, what is rebuilt."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_policy import BAD, NODES, OK, Bench, Chosen, kinds

from slurm_resil.core.model import Level, NoticeKind
from slurm_resil.core.protection import Protection
from slurm_resil.launch import moves as m
from slurm_resil.launch.encodes import Encodes
from slurm_resil.launch.policy import Phase, Rules

SETS = (("n1", "n2", "n3"),)


def bench(*schemes, drain_every=1, **known):
    made = Bench(chosen=Chosen(*schemes or ("xor",), drain_every=drain_every), sets=SETS, **known)
    made.on(m.Restored(iteration=0, cycle=0))
    return made


def seal(b, iteration, after=0.0):
    return b.on(m.SealedAll(iteration=iteration), after)


def encode(iteration, scheme="xor", finish=False):
    return m.Encode(iteration=iteration, scheme=scheme, finish=finish)


def test_what_is_sealed_is_protected_and_then_drained():
    b = bench()
    assert seal(b, 10) == [encode(10)]
    actions = b.encoded(10, seconds=1.5)
    assert actions == [m.TellProtected(iteration=10, seconds=1.5), m.Drain(iteration=10, capped=True)]
    assert seal(b, 20) == [encode(20)]  # beside the drain
    assert b.encoded(20) == [m.TellProtected(iteration=20, seconds=1.0)]
    b.drained(10)
    assert b.tick(3.0) == [m.Drain(iteration=20, capped=True)]


def test_the_newest_is_encoded_and_one_that_was_overtaken_is_not():
    b = bench()
    seal(b, 10)
    assert seal(b, 20) == seal(b, 30) == []  # one at a time
    # the drain goes for what is protected, not for the newest: else it would never begin
    assert b.encoded(10)[1:] == [encode(30), m.Drain(iteration=10, capped=True)]


def test_a_stronger_scheme_that_was_due_is_not_lost_with_the_one_that_was_overtaken():
    b = bench("xor", "rs:2", "xor", "xor")
    seal(b, 10)
    seal(b, 20)
    seal(b, 30)
    assert encode(30, "rs") in b.encoded(10)
    seal(b, 40)
    b.encoded(30, ok=False, words="the slot was taken")
    assert encode(40, "rs") in b.asked


def test_each_checkpoint_gets_what_the_list_says():
    """Every one xor, every tenth rs, every fifth drained; the numbers begin at 0."""
    b = Bench(chosen=Protection.parse("xor,rs:2/10,drain/5"), sets=SETS)
    b.on(m.Restored(iteration=0, cycle=0))
    schemes, drained = [], []
    for number in range(25):
        iteration = 10 * (number + 1)
        (made,) = (one for one in seal(b, iteration, after=30.0) if isinstance(one, m.Encode))
        schemes.append(made.scheme)
        for one in b.encoded(iteration):
            if isinstance(one, m.Drain):
                drained.append(number)
                b.drained(one.iteration)
    assert schemes == ["rs" if number % 10 == 0 else "xor" for number in range(25)]
    assert drained == [0, 5, 10, 15, 20]
    assert m.Drain(iteration=250, capped=False) in b.on(m.RanksEnded(verdict=OK))  # the last one always


def test_an_encode_that_fails_is_tried_again_within_a_budget_and_the_checkpoint_is_drained_all_the_same():
    b = bench()
    seal(b, 10)
    for _ in range(2):
        assert b.encoded(10, ok=False, words="no route to host") == []
        assert encode(10) in b.tick(3.0)
    assert b.encoded(10, ok=False) == [m.TellUnprotected(iteration=10), m.Drain(iteration=10, capped=True)]
    assert b.tick(10) == []
    assert seal(b, 20) == [encode(20)]  # the next one has its own


def test_an_encode_that_hangs_is_ended_and_counts_as_failed():
    b = bench()
    seal(b, 10)
    assert b.tick(59.0) == []
    (cancel,) = b.tick(2.0)
    assert isinstance(cancel, m.CancelEncode)
    assert b.tick(5.0) == []
    assert b.encoded(10, ok=False, words="killed") == []
    assert encode(10) in b.tick(3.0)
    b.encoded(10, seconds=30.0)
    seal(b, 20)
    assert b.tick(290.0) == []  # others take as long
    assert kinds(b.tick(20.0)) == [m.CancelEncode]


def test_what_would_end_the_same_way_is_not_tried_again():
    b = bench()
    seal(b, 10)
    assert m.TellUnprotected(iteration=10) in b.encoded(10, ok=False, final=True, words="shard is damaged")


def test_without_room_protection_is_off_and_training_is_not_touched():
    b = bench()
    seal(b, 10)
    reports = []
    for _ in range(Rules.encode_tries):
        actions = b.policy.on(
            m.MoverEnded(kind="encode", iteration=10, ok=False, duration_s=1.0, words="7 needed, 5 free", no_room=True),
            b.now,
        )
        reports += [one for one in actions if isinstance(one, m.Report)]
        drains = [one for one in actions if isinstance(one, m.Drain)]
        b.tick(3.0)
    assert [one.event for one in reports] == ["encode_failed"] * 3 + ["protection_off"]
    assert reports[-1].fields == {"words": "7 needed, 5 free"}
    assert drains == [m.Drain(iteration=10, capped=True)]
    b.drained(10)
    assert seal(b, 20, after=5.0) == [m.TellUnprotected(iteration=20), m.Drain(iteration=20, capped=True)]
    assert b.on(m.Restored(iteration=20, cycle=1)) == []  # nor after a restart of the ranks


def test_an_encode_that_was_asked_to_end_has_not_failed():
    b = bench()
    seal(b, 10)
    for _ in range(2 * Rules.encode_tries):
        assert encode(10) in b.encoded(10, ok=False, stopped=True)
    assert b.encoded(10)[0] == m.TellProtected(iteration=10, seconds=1.0)


def test_room_that_was_short_once_is_tried_again():
    b = bench()
    seal(b, 10)
    b.encoded(10, ok=False, words="full", no_room=True)
    assert encode(10) in b.tick(3.0)
    b.encoded(10)
    assert b.policy.encodes.protected == 10 and not b.policy.encodes.off


def test_an_overtaken_encode_is_no_failure():
    b = bench()
    seal(b, 10)
    seal(b, 20)
    assert b.encoded(10, ok=False, words="not sealed by rank 3") == [m.TellUnprotected(iteration=10), encode(20)]
    assert b.policy.encodes.protected == 0


def test_a_checkpoint_without_a_scheme_is_said_not_to_be_protected():
    b = bench("xor", "single")
    seal(b, 10)
    b.encoded(10)
    assert seal(b, 20) == [m.TellUnprotected(iteration=20)]
    b.drained(10)
    assert b.tick(3.0) == [m.Drain(iteration=20, capped=True)]


def test_only_every_so_manieth_is_drained_while_training_goes_on_and_the_last_one_always():
    b = bench(drain_every=3)
    drained = []
    for number in range(1, 7):
        seal(b, 10 * number)
        b.encoded(10 * number)
        if b.policy.drains.moving:
            drained.append(b.policy.drains.moving)
            b.drained(b.policy.drains.moving)
        b.tick(3.0)
    assert drained == [10, 40]
    assert b.on(m.RanksEnded(verdict=OK)) == [m.Drain(iteration=60, capped=False)]


def test_one_that_is_due_to_be_drained_and_overtaken_leaves_that_to_the_next():
    b = bench(drain_every=3)
    seal(b, 10)
    b.encoded(10)
    b.drained(10)
    b.tick(3.0)
    seal(b, 20)  # is being encoded
    for iteration in (30, 40, 50):
        seal(b, iteration)  # 40 is the one that is due
    assert b.encoded(20) == [m.TellProtected(iteration=20, seconds=1.0), encode(50)]
    assert b.encoded(50)[1:] == [m.Drain(iteration=50, capped=True)]


def test_a_drain_that_fails_beside_newer_saves_waits_before_it_is_tried_again():
    b = bench()
    seal(b, 10)
    b.encoded(10)
    seal(b, 20)  # is being encoded
    b.drained(10, ok=False)
    assert b.policy.drains.moving is None
    assert b.tick(1.0) == []
    assert b.tick(2.0) == [m.Drain(iteration=10, capped=True)]


def test_durable_comes_first_and_nothing_is_left_to_protect():
    b = bench()
    seal(b, 10)
    b.encoded(10, ok=False)
    b.policy.drains.durable = 10
    assert b.tick(10) == []


@pytest.mark.parametrize(
    ("left_s", "encode_s", "drain_s", "first"),
    [
        (None, 1.0, 10.0, True),  # it is worth that little
        (None, 6.0, 10.0, False),
        (100.0, 1.0, 10.0, True),
        (100.0, 6.0, 10.0, False),  # durable is soon enough
        (10.5, 1.0, 10.0, False),  # both do not fit, and the drain does
        (9.0, 1.0, 10.0, True),  # only the encode fits
        (0.5, 1.0, 10.0, True),  # nothing fits: what is shorter
        (0.5, 12.0, 10.0, False),
    ],
)
def test_at_an_end_what_can_still_be_reached_goes_first(left_s, encode_s, drain_s, first):
    encodes = Encodes(Chosen("xor"), guess_s=encode_s, tries=3, retry_s=1.0, limit_s=60.0)
    encodes.all_sealed(10, 0)
    assert encodes.first(0.0, 0, left_s, drain_s) is first
    encodes.start(0.0, 0)
    assert encodes.first(0.0, 0, left_s, drain_s) is first  # being at it changes nothing
    assert not encodes.first(1000.0, 0, left_s, drain_s)  # it hangs
    encodes.ended(m.MoverEnded(kind="encode", iteration=10, ok=True, duration_s=1.0), 1.0)
    assert not encodes.first(0.0, 0, left_s, drain_s)


def test_a_deadline_that_leaves_no_time_for_the_drain_gets_the_encode():
    b = bench(rules=Rules(drain_guess_s=30.0, encode_guess_s=2.0, margin_s=4.0))
    b.notice(deadline=20.0)
    assert b.on(m.StopReached(iteration=44), 1.0) == [encode(44, finish=True)]
    actions = b.encoded(44, seconds=2.0)
    assert actions == [m.TellProtected(iteration=44, seconds=2.0), m.Drain(iteration=44, capped=False)]
    actions = b.tick(20.0)
    assert kinds(actions) == [m.KillRanks, m.CancelDrain, m.Continue]
    assert actions[-1] == m.Continue(reason="preemption", iteration=44, level=Level.PROTECTED)


def test_a_stop_with_time_enough_is_durable():
    b = bench()
    b.policy.drains.cost_s = 1.0  # no longer than an encode
    b.notice(deadline=100.0)
    assert b.on(m.StopReached(iteration=44)) == [m.Drain(iteration=44, capped=False)]
    b.on(m.RanksEnded(verdict=OK))
    assert b.drained(44)[-1] == m.Continue(reason="preemption", iteration=44, level=Level.DURABLE)


def test_a_stop_ends_the_encode_of_an_older_checkpoint():
    b = bench()
    seal(b, 40)
    b.notice()
    actions = b.on(m.StopReached(iteration=44))
    assert m.CancelEncode(why="iteration 44 is the one to keep, without a cap") in actions
    assert m.TellUnprotected(iteration=40) in b.encoded(40, ok=False)
    assert b.policy.encodes.moving in (None, 44)


def test_a_stop_whose_drain_does_not_work_is_protected_at_least():
    b = bench()
    b.policy.drains.cost_s = 1.0
    b.notice(kind=NoticeKind.WALLTIME, deadline=300.0)
    b.on(m.StopReached(iteration=44))
    b.on(m.RanksEnded(verdict=OK))
    for _ in range(3):
        b.drained(44, ok=False)
        b.tick(3.0)
    assert encode(44, finish=True) in b.asked
    assert m.Continue(reason="walltime", iteration=44, level=Level.PROTECTED) in b.encoded(44)


@pytest.mark.parametrize(("dead", "expected"), [(("n2",), (20, Level.PROTECTED)), (("n1", "n2"), (10, Level.DURABLE))])
def test_after_the_loss_of_nodes_what_is_covered_counts(dead, expected):
    b = bench()
    seal(b, 10)
    b.encoded(10)
    b.drained(10)
    seal(b, 20, 5.0)
    b.encoded(20)
    seal(b, 30)  # not protected yet
    for node in dead:
        b.on(m.NodeLost(node=node, why="connection closed"))
    actions = b.probed(*dead)
    assert kinds(actions) == [m.KillRanks, m.CancelEncode, m.CancelDrain, m.Continue]
    assert (actions[-1].iteration, actions[-1].level) == expected


def test_what_was_protected_before_is_not_encoded_again():
    b = Bench(chosen=Chosen("xor"), sets=SETS)
    assert encode(40) not in b.on(m.Restored(iteration=40, cycle=0, protected=40, durable=20))
    b = Bench(chosen=Chosen("xor"), sets=SETS)
    assert b.on(m.Restored(iteration=40, cycle=0, protected=20, durable=20)) == [encode(40)]
    b = Bench(chosen=Chosen("xor"), sets=SETS)
    assert b.on(m.Restored(iteration=40, cycle=0, durable=40)) == []


def test_a_new_cycle_ends_an_encode_and_looks_at_what_it_restores_anew():
    b = bench()
    seal(b, 10)
    b.on(m.RanksEnded(verdict=BAD))
    assert kinds(b.probed()) == [m.CancelEncode, m.StartCycle]
    assert b.encoded(10, ok=False) == []
    assert b.tick(5.0) == []  # while they load
    assert b.on(m.Restored(iteration=10, cycle=1)) == [encode(10)]


def test_lost_shards_are_rebuilt_for_a_bounded_time_and_the_leader_is_told():
    b = Bench(chosen=Chosen("xor"), sets=SETS, rules=Rules(rebuild_limit_s=60.0))
    wanted = m.RebuildWanted(iteration=40, nodes=["n2"])
    assert b.on(wanted) == [m.Rebuild(iteration=40)]
    done = m.MoverEnded(kind="rebuild", iteration=40, ok=True, duration_s=2.0)
    assert b.on(done, 2.0) == [m.TellRebuilt(iteration=40, ok=True)]
    b.on(wanted)
    assert b.tick(59.0) == []
    (cancel,) = b.tick(3.0)
    assert isinstance(cancel, m.CancelRebuild)
    assert "60 s" in cancel.why
    failed = m.MoverEnded(kind="rebuild", iteration=40, ok=False, duration_s=61.0, words="killed")
    assert b.on(failed) == [m.TellRebuilt(iteration=40, ok=False)]
    assert b.tick(100.0) == []


def test_a_node_that_dies_while_shards_are_rebuilt_ends_that():
    b = Bench(chosen=Chosen("xor"), sets=SETS)
    b.on(m.RebuildWanted(iteration=40, nodes=["n2"]))
    b.on(m.NodeLost(node="n3", why="x"))
    assert kinds(b.probed("n3")) == [m.KillRanks, m.CancelRebuild, m.Continue]
    assert b.policy.phase is Phase.CONTINUING
    assert b.on(m.RebuildWanted(iteration=40, nodes=list(NODES))) == []


def test_what_an_attempt_before_has_protected_is_not_where_nothing_protects_now():
    """Its sets are not known any more: what is certain is what is durable."""
    b = Bench(sets=())
    b.on(m.Restored(iteration=20, cycle=0, protected=20, durable=10))
    b.on(m.NodeLost(node="n1", why="connection closed"))
    request = b.probed("n1")[-1]
    assert (request.iteration, request.level) == (10, Level.DURABLE)
