"""What the launcher's loop looks up for its policy."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from stock import drained

from slurm_resil.agent import events as e
from slurm_resil.launch import moves as m
from slurm_resil.launch.policy import Policy, Rules
from slurm_resil.launch.supervise import newest_durable


def test_what_is_newer_than_what_was_restored_does_not_count_as_durable(tmp_path):
    drained(tmp_path / "r", 10, 40, 50)
    run = str(tmp_path / "r")
    assert newest_durable(run) == 50
    assert newest_durable(run, up_to=45) == 40
    assert newest_durable(run, up_to=5) == newest_durable(str(tmp_path / "none"), up_to=5) == 0
    restored = e.Restored(cycle=0, iteration=40)  # nobody could read 50
    policy = Policy(("n1",), Rules(), durable=50)
    durable = newest_durable(run, up_to=restored.iteration)
    policy.on(m.Restored(iteration=restored.iteration, cycle=0, durable=durable), 1.0)
    drains = [a for a in policy.on(m.SealedAll(iteration=45), 2.0) if isinstance(a, m.Drain)]
    assert drains == [m.Drain(iteration=45, capped=True)]  # else nothing would be drained until 50 is passed
