"""What ``Checkpointer.step()`` costs when nothing is asked, with a real agent beside it.

The reference is an empty method call with one argument, in the same loop and the same run.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

from slurm_resil.agent.agent import main_agent
from slurm_resil.agent.place import Place, from_env
from slurm_resil.agent.setup import AgentConfig
from slurm_resil.bench.result import BenchResult
from slurm_resil.format.manifest import ShardManifest
from slurm_resil.session import Checkpointer

CALLS = 200_000
REPEATS = 9


class _Nothing:
    """A burst buffer without shards, and a state without contents: nothing is saved here."""

    def sealed(self) -> dict[int, dict[int, str]]:
        return {}

    def seal(self, draft: ShardManifest) -> ShardManifest:
        return draft

    def prepare(self, rank: int, index: int, slots: int, layout: str) -> bool:
        return True

    def quarantine(self, iteration: int, rank: int, reason: str) -> str | None:
        return None

    def encoded(self) -> set[int]:
        return set()

    def forget(self, iteration: int) -> None:
        """There is nothing to remove."""

    def write(self, index: int, iteration: int) -> str:
        raise AssertionError("nothing asks for a save")

    def start(self, index: int, iteration: int) -> Callable[[], str]:
        raise AssertionError("nothing asks for a save")

    def want(self) -> str:
        return ""

    def take(self, indices: tuple[int, ...]) -> None:
        """Map nothing."""

    def close(self) -> None:
        """There is nothing to close."""

    def load_local(self, iteration: int) -> None:
        raise AssertionError("there is nothing to load")

    load_shards = load_drained = load_local


class _Empty:
    def step(self, iteration: int) -> bool:
        """Do nothing."""
        return False


def _place(work: str) -> Place:
    run_dir = os.path.join(work, "run")
    os.makedirs(run_dir, exist_ok=True)
    place = from_env({"SLURM_RESIL_RUN_ID": "bench", "SLURM_RESIL_BB_ROOT": work})
    return replace(place, run_dir=run_dir)


def _seconds(step: Callable[[int], bool], first: int, calls: int) -> float:
    began = time.perf_counter()
    for iteration in range(first, first + calls):
        step(iteration)
    return (time.perf_counter() - began) / calls


def measure(*, calls: int = CALLS, repeats: int = REPEATS) -> BenchResult:
    """Measure.

    Args:
        calls: Calls in a repeat.
        repeats: Repeats; the median counts.

    Returns:
        Figures ``step_us``, ``step_worst_us`` (the slowest repeat's mean) and ``call_us``, ratio ``step_over_call``.
    """
    with tempfile.TemporaryDirectory(prefix="resil-bench.") as work:
        place = _place(work)
        agent = subprocess.Popen([sys.executable, "-m", "slurm_resil.bench.control", work], stderr=subprocess.DEVNULL)
        try:
            steps, empties = [], []
            # the launcher's part is played by this process: it starts the agent
            with Checkpointer(replace(place, leader="none"), lambda *_: _Nothing()) as checkpointer:
                first = checkpointer.restore() + 1
                for _ in range(repeats):
                    empties.append(_seconds(_Empty().step, first, calls))
                    steps.append(_seconds(checkpointer.step, first, calls))
                    first += calls
            agent.wait(30)
        finally:
            agent.kill()
            agent.wait()
    step, empty = statistics.median(steps), statistics.median(empties)
    return BenchResult(
        bench="control",
        size_bytes=0,
        repeats=repeats,
        ratios={"step_over_call": round(step / empty, 3)},
        figures={
            "step_us": round(step * 1e6, 4),
            "step_worst_us": round(max(steps) * 1e6, 4),
            "call_us": round(empty * 1e6, 4),
        },
    )


def _agent(work: str) -> int:
    place = _place(work)
    config = AgentConfig(
        info=place.info,
        node=place.node,
        node_rank=0,
        nodes=(place.node,),
        ranks_per_node=1,
        job_dir=place.job_dir,
        run_dir=place.run_dir,
    )
    return main_agent(config, _Nothing())


if __name__ == "__main__":
    sys.exit(_agent(sys.argv[1]))
