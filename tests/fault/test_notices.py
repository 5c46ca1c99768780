"""Notice after notice to real agents on eight "nodes", with iterations of a millisecond: all save at the same one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from nodes import Nodes

NODES = 8


def notices(work: Path, count: int, enough_s: float) -> int:
    """Ask for a checkpoint whenever the one before is sealed; returns how often all ranks have saved together."""
    nodes = Nodes(work, nodes=NODES, per_node=1)
    try:
        nodes.start(iterations=1_000_000_000, pace_s=0.001)
        nodes.event("Restored", 120)
        nodes.train_to(10)
        end, done = time.monotonic() + enough_s, 0
        while done < count and time.monotonic() < end:
            nodes.leader.tell("checkpoint")
            nodes.event("SealedAll", 60, count=done + 1)
            done += 1
        nodes.leader.tell("stop 60")
        reached = nodes.event("StopReached", 90)
        assert reached["saved"]
        assert nodes.wait_ranks(90) == [0] * NODES
        saved = nodes.said("saved")
        sealed = [line["iteration"] for line in nodes.leader.lines if line["event"] == "SealedAll"]
        assert len(sealed) == done + 1
        assert saved == dict.fromkeys(range(NODES), sealed)
        assert nodes.said("error") == {rank: [] for rank in range(NODES)}
    except BaseException:
        print(nodes.logs())
        raise
    finally:
        nodes.close()
    return done


def test_every_notice_is_taken_at_one_iteration(tmp_path: Path) -> None:
    assert notices(tmp_path, 300, enough_s=20) > 10


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_ten_thousand_notices(tmp_path: Path) -> None:
    assert notices(tmp_path, 10_000, enough_s=6000) == 10_000
