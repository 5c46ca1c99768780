from __future__ import annotations

from slurm_resil.agent.keeping import KEEP, Keeping


def keeping(**changes: int) -> Keeping:
    made = Keeping()
    for name, value in {"sealed_all": 50, **changes}.items():
        setattr(made, name, value)
    return made


def gone(made: Keeping, *encoded: int, tight: bool = False) -> list[int]:
    return [one for one in (10, 20, 30, 40, 50, 60) if made.expendable(one, encoded, tight=tight)]


def test_the_newest_that_all_have_stays_and_what_may_become_it() -> None:
    assert gone(keeping()) == [10, 20, 30, 40]
    assert gone(keeping(sealed_all=0, restored=30)) == [10, 20]
    assert gone(keeping(sealed_all=0)) == []
    made = keeping()
    made.given_up.add(60)
    assert gone(made) == [10, 20, 30, 40, 60]


def test_the_protected_one_stays_until_a_newer_one_is_protected_or_durable() -> None:
    made = keeping()
    made.is_protected(20)
    assert gone(made, 10, 20) == [10, 30, 40]
    made.is_protected(10)  # said again
    assert gone(made, 10, 20) == [10, 30, 40]
    made.is_durable(10)
    assert gone(made, 10, 20) == [10, 30, 40]
    made.is_durable(20)
    assert gone(made, 10, 20) == [10, 20, 30, 40]
    made.is_protected(40)
    assert gone(made, 20, 40) == [10, 20, 30]


def test_what_has_redundancy_here_stays_until_it_is_known_what_has_become_of_it() -> None:
    made = keeping()
    made.is_protected(10)
    assert gone(made, 10, 30) == [20, 40]
    made.is_unprotected(30)
    assert gone(made, 10, 30) == [20, 30, 40]
    made = keeping()
    made.is_protected(10)
    made.is_durable(40)
    assert gone(made, 10, 30) == [10, 20, 30, 40]


def test_with_two_slots_the_protected_one_goes_if_nothing_newer_will_be() -> None:
    made = keeping(protected=40)
    assert 40 not in gone(made, 40, tight=True)  # 50 is still to be encoded
    made.is_unprotected(50)
    assert 40 not in gone(made, 40)
    assert 40 in gone(made, 40, tight=True)


def test_a_plan_says_what_is_protected_and_what_was_left_half_done() -> None:
    made = keeping(sealed_all=0, protected=60)
    made.plan(50, 20, 10, {10, 20, 30, 50})
    made.all_sealed(50)
    assert gone(made, 10, 20, 30, 50) == [10, 30, 40]
    made.begin()
    assert gone(made, 10, 20, 30, 50) == []


def test_what_is_not_protected_is_not_remembered_for_ever() -> None:
    made = keeping()
    for iteration in range(10 * KEEP):
        made.is_unprotected(iteration)
    assert len(made._unprotected) == KEEP
    made.is_protected(10 * KEEP)
    assert not made._unprotected


def test_words() -> None:
    made = keeping()
    assert made.words() == "all ranks have sealed 50"
    made.is_protected(40)
    assert "40 is the newest that is protected" in made.words()
