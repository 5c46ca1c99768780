"""The durable checkpoint is staged while the ranks of an attempt start, and nothing hangs on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_resil.core import paths
from slurm_resil.core.errors import ConfigError
from slurm_resil.core.model import NoticeKind
from slurm_resil.launch import moves as m
from slurm_resil.launch import records, setup
from slurm_resil.launch.policy import Phase, Policy, Rules
from slurm_resil.launch.verdict import Verdict

NODES = ("n1", "n2", "n3")
OK = Verdict(code=0, words="all ranks ended well")
BAD = Verdict(code=7, rank=2, node="n3", words="exited with code 7")


def kinds(actions: list[m.Action]) -> list[type[m.Action]]:
    return [type(action) for action in actions]


def begin(durable: int = 40, *, fetches: bool = True) -> tuple[Policy, list[m.Action]]:
    policy = Policy(NODES, Rules(fetches=fetches), durable=durable)
    return policy, policy.start()


def ended(policy: Policy, *, ok: bool = True, words: str = "") -> m.Report:
    event = m.MoverEnded(kind="fetch", iteration=40, ok=ok, duration_s=1.5, words=words)
    (report,) = policy.on(event, 103.0)
    assert isinstance(report, m.Report)
    return report


def test_it_begins_beside_the_ranks_with_the_attempt_alone() -> None:
    policy, actions = begin()
    assert actions == [m.StartCycle(cycle=0), m.Fetch(iteration=40)]
    assert ended(policy, words="2 of 2 nodes").fields["words"] == "2 of 2 nodes"
    policy.on(m.Restored(iteration=40, cycle=0, durable=40), 104.0)
    policy.on(m.RanksEnded(verdict=BAD), 105.0)
    again = policy.on(m.Probed(alive=dict.fromkeys(NODES, True)), 106.0)
    assert m.StartCycle in kinds(again) and m.Fetch not in kinds(again)


@pytest.mark.parametrize(("durable", "fetches"), [(0, True), (40, False)])
def test_nothing_to_stage_or_not_wanted(durable: int, fetches: bool) -> None:
    policy, actions = begin(durable, fetches=fetches)
    assert actions == [m.StartCycle(cycle=0)]
    assert m.CancelFetch not in kinds(policy.on(m.Restored(iteration=40, cycle=0, durable=40), 104.0))


def test_it_ends_when_the_ranks_have_restored() -> None:
    policy, _ = begin()
    actions = policy.on(m.Restored(iteration=40, cycle=0, durable=40), 104.0)
    assert m.CancelFetch(why="the ranks have restored") in actions
    report = ended(policy, ok=False, words="exit code -9")
    assert report.event == "fetch_cancelled" and report.fields["words"] == "the ranks have restored"


def test_one_that_fails_is_told_and_changes_nothing() -> None:
    policy, _ = begin()
    report = ended(policy, ok=False, words="block 3 is damaged")
    assert report.event == "fetch_failed" and "block 3" in str(report.fields["words"])
    assert policy.phase is Phase.RUNNING


def test_neither_a_stop_nor_an_end_waits_for_it() -> None:
    policy, _ = begin()
    policy.on(m.Noticed(kind=NoticeKind.PREEMPTION, stop=True, deadline=130.0), 101.0)
    actions = policy.on(m.Tick(), 127.0)
    assert m.CancelFetch(why="the deadline is near") in actions and kinds(actions)[-1] is m.Continue
    policy, _ = begin()
    assert kinds(policy.on(m.RanksEnded(verdict=OK), 102.0))[-1] is m.Finish


def test_a_lost_node_ends_it() -> None:
    policy, _ = begin()
    policy.on(m.NodeLost(node="n2", why="gone"), 101.0)
    assert m.CancelFetch(why="lost n2") in policy.on(m.Probed(alive={**dict.fromkeys(NODES, True), "n2": False}), 102.0)


def site(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "site.toml"
    path.write_text(f"[drain]\nfetch = {text}\n")
    return {"SLURM_RESIL_SITE": str(path)}


@pytest.mark.parametrize(
    ("said", "nodes", "durable", "expected", "wanted"),
    [
        ('"auto"', 2, 40, 0, True),
        ('"auto"', 1, 40, 0, False),
        ('"on"', 1, 40, 0, True),
        ('"off"', 2, 40, 0, False),
        ('"on"', 2, 0, 0, False),
        ('"auto"', 2, 40, 40, True),
        ('"auto"', 2, 40, 60, False),  # the burst buffers have a newer one
    ],
)
def test_what_the_site_says(tmp_path: Path, said: str, nodes: int, durable: int, expected: int, wanted: bool) -> None:
    assert setup.fetches(site(tmp_path, said), nodes, durable, expected) is wanted


def test_a_site_that_says_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        setup.fetches(site(tmp_path, '"yes"'), 2, 40, 0)
    assert "[drain] fetch is 'yes': one of auto, on, off is needed" in caught.value.faults[0]


def test_what_the_attempt_before_wanted(tmp_path: Path) -> None:
    assert records.goes_on_from(str(tmp_path), 7) == 0
    record = records.Attempt(str(tmp_path), 3, job_id=7, restarts=3, nodes=["n1"])
    record.update()
    assert records.goes_on_from(str(tmp_path), 7) == 0
    record.update(intent={"iteration": 60, "level": "LOCAL"})
    assert records.goes_on_from(str(tmp_path), 7) == 60
    assert records.goes_on_from(str(tmp_path), 8) == 0  # another job has other burst buffers
    path = Path(paths.attempt(str(tmp_path), 3))
    path.write_text(json.dumps({"job_id": 7, "intent": {"iteration": None}}))
    assert records.goes_on_from(str(tmp_path), 7) == 0
