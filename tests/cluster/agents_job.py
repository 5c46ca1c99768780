"""Agents and ranks of tests/fault/raw.py as steps of a real job: `agents_job.py agent|rank`, all from the environment.

No launcher: the agent of node 0 hosts the leader at its node's address, the others find it by leader.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fault"))

from raw import RawState, RawStore

from slurm_resil.agent.agent import main_agent
from slurm_resil.agent.place import from_env
from slurm_resil.cli.agent import config
from slurm_resil.core import log
from slurm_resil.core.model import Notice, NoticeKind
from slurm_resil.session import Checkpointer


def main() -> int:
    log.configure()
    place = from_env(os.environ)
    if sys.argv[1] == "agent":
        flag = Path(place.run_dir, "please-stop")

        def watch() -> list[Notice]:
            return [Notice(kind=NoticeKind.WALLTIME, stop=True, source="the test")] if flag.exists() else []

        made = config(place, os.environ)
        print(json.dumps({"host": made.host, "node": place.node}), flush=True)
        return main_agent(made, RawStore(place.job_dir), watch=watch)
    place = dataclasses.replace(place, leader="somebody starts the agents")
    state = RawState(place)
    with Checkpointer(place, lambda *_: state, every=50) as checkpointer:
        start = checkpointer.restore(timeout_s=60)
        for number in range(start + 1, 100_000):
            state.train(number)
            time.sleep(0.01)
            if checkpointer.step(number):
                print(json.dumps({"rank": place.rank, "start": start, "stopped": number}), flush=True)
                return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
