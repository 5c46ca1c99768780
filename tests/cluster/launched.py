"""Jobs under the launcher on a real cluster, watched from outside."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slurm_resil.recovery.actions import SETTLE_S
from slurm_resil.sandbox import Sandbox
from slurm_resil.slurm.scontrol import fields

FAULT = Path(__file__).resolve().parents[1] / "fault"
ROOT = FAULT.parents[1]
sys.path.insert(0, str(FAULT))

from nodes import wait_for  # noqa: E402 - found by the line above
from test_launch import expected as expected  # noqa: E402

SCRIPT = """#!/bin/bash
export PYTHONPATH={site}:{root} PYTHONDONTWRITEBYTECODE=1 PATH={bin}:$PATH
python -m slurm_resil run {launcher} --every 10 -- python {train} {options}
"""


class Job:
    """A job under the launcher, watched from outside."""

    def __init__(
        self,
        sandbox: Sandbox,
        *options: str,
        launcher: str = "",
        sbatch: tuple[str, ...] = (),
        script: str = SCRIPT,
    ) -> None:
        self.sandbox = sandbox
        self.dir = sandbox.pfs / f"launch-{time.monotonic_ns()}"
        self.dir.mkdir()
        self.dir.chmod(0o777)
        path = self.dir / "job.sh"
        path.write_text(
            script.format(
                site=FAULT / "rawsite",
                root=ROOT,
                bin=Path(sys.executable).parent,
                launcher=launcher,
                train=FAULT / "raw_train.py",
                options=" ".join(options),
            )
        )
        argv = ["sbatch", "--parsable", "-N3", "--ntasks-per-node=2", "--requeue", "--open-mode=append", "--time=10"]
        argv += [f"--chdir={self.dir}", "--output=out.txt", *sbatch, str(path)]
        self.id = int(sandbox.run(argv, user="alice", cwd=self.dir).stdout)
        self.run_dir = self.dir / ".slurm-resil" / str(self.id)

    @property
    def out(self) -> str:
        path = self.dir / "out.txt"
        return path.read_text() if path.exists() else ""

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What the ranks said, each with the label that srun put before it."""
        found = []
        for line in self.out.splitlines():
            label, _, text = line.partition(": ")
            if text.startswith('{"rank"'):
                found.append({"label": int(label), **json.loads(text)})
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def wait_event(self, name: str, count: int = 1, timeout_s: float = 60.0) -> dict[str, Any]:
        wait_for(f"{count} x {name}\n{self.out}", lambda: len(self.named(name)) >= count, timeout_s)
        return self.named(name)[count - 1]

    @property
    def record(self) -> dict[str, str]:
        done = self.sandbox.run(["scontrol", "-o", "show", "job", str(self.id)], check=False)
        return fields(done.stdout)

    def wait_state(self, *states: str, timeout_s: float = 60.0) -> dict[str, str]:
        def reached() -> dict[str, str] | None:
            time.sleep(0.2)  # each look starts a process
            record = self.record
            return record if record.get("JobState") in states else None

        return wait_for(f"{states}, it is {self.record.get('JobState')}\n{self.out}", reached, timeout_s)

    def hurry(self, attempt: int) -> None:
        """Take away the two minutes that Slurm lets a requeued job wait; it is another part's work to do that.

        Not within the second in which the last attempt was killed: slurmd would take the new one for that and fail it.
        """
        pending_s = 0.0

        def started() -> bool:
            nonlocal pending_s
            time.sleep(0.2)
            pending_s = (pending_s or time.monotonic()) if self.record.get("JobState") == "PENDING" else 0.0
            if pending_s and time.monotonic() - pending_s > SETTLE_S:
                self.sandbox.run(["scontrol", "update", f"JobId={self.id}", "StartTime=now"], check=False)
            return any(event["attempt"] == attempt for event in self.named("attempt_start"))

        wait_for(f"attempt {attempt}, {self.record.get('JobState')}\n{self.out}", started, 60)

    def starts(self, attempt: int, cycle: int = 0) -> dict[int, dict[str, Any]]:
        found = [line for line in self.lines if "start" in line]
        return {line["rank"]: line for line in found if (line["attempt"], line["cycle"]) == (attempt, cycle)}

    def assert_complete(self, iterations: int, ranks: int = 6, *, skips: bool = False) -> None:
        """The job is over, well, and every rank's state is that of a run without faults.

        Saves that come faster than encodes are done may be skipped, if the test says so; nothing that is sealed may.
        """
        self.wait_state("COMPLETED", timeout_s=90)
        digests = {line["rank"]: line["digest"] for line in self.lines if "digest" in line}
        assert digests == {rank: expected(rank, iterations) for rank in range(ranks)}
        assert all(line["label"] == line["rank"] for line in self.lines)  # srun's labels are our ranks
        assert self.events[-1]["event"] == "finished"
        saved = max(event["iteration"] for event in self.named("sealed")) if skips else iterations
        assert self.events[-1]["durable"] == saved > iterations - 50


@contextlib.contextmanager
def jobs(sandbox: Sandbox) -> Iterator[Callable[..., Job]]:
    """Start jobs; in the end they are cancelled, and the nodes are there again."""
    made: list[Job] = []

    def make(*options: str, **more: Any) -> Job:
        made.append(Job(sandbox, *options, **more))
        return made[-1]

    yield make
    for job in made:
        print(job.out, sandbox.run(["scontrol", "show", "job", str(job.id)], check=False).stdout)
        sandbox.run(["scancel", str(job.id)], check=False)
    for job in made:
        job.wait_state("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", timeout_s=60)
    for node, state in sandbox.node_states().items():
        if not state.startswith(("idle", "completing")):
            sandbox.node_restore(node, resume=True)
