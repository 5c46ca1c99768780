"""Several "nodes" on this host, each with a burst buffer directory of its own; all processes are real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_resil.core import control, paths
from slurm_resil.core.model import RunInfo

RAW = str(Path(__file__).with_name("raw.py"))
JOB = 7


def wait_for(what: str, check: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)


class Process:
    """A process whose standard output is JSON lines."""

    def __init__(self, kind: str, config: dict[str, Any], log: Path, fault: str = "") -> None:
        env = {**os.environ, "SLURM_RESIL_FAULT": fault}
        self.lines: list[dict[str, Any]] = []
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, RAW, kind, json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self, timeout_s: float = 60.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return code

    @property
    def running(self) -> bool:
        return self.process.poll() is None


class Nodes:
    """A run on several nodes.

    Args:
        work: Directory of the test.
        nodes: Number of nodes.
        per_node: Ranks of each.
        attempt: Attempt.
    """

    def __init__(self, work: Path, nodes: int = 2, per_node: int = 2, attempt: int = 0) -> None:
        self.work, self.count, self.per_node = work, nodes, per_node
        self.info = RunInfo(
            run_id="run", job_id=JOB, attempt=attempt, cycle=0, world_size=nodes * per_node, nodes=nodes
        )
        self.run_dir = work / "pfs" / "run"
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.names = [f"node{place}" for place in range(nodes)]
        for place in range(nodes):
            (work / f"bb{place}").mkdir(exist_ok=True)
        self.leader: Process
        self.agents: dict[int, Process] = {}
        self.ranks: dict[int, Process] = {}
        self._all: list[Process] = []

    def job_dir(self, place: int) -> str:
        return paths.job_dir(str(self.work / f"bb{place}"), JOB)

    def start_leader(self, fault: str = "", cycle: int = 0) -> None:
        config = {
            "info": asdict(self.info) | {"cycle": cycle},
            "nodes": self.names,
            "ranks_per_node": self.per_node,
            "run_dir": str(self.run_dir),
        }
        self.leader = self._add(Process("leader", config, self.work / "leader.log", fault))
        self.event("up")

    def start_agent(self, place: int, fault: str = "", *, leader: str | None = "record") -> None:
        """Start an agent; it finds the leader on record (the address here is one where nobody listens)."""
        config = {
            "info": asdict(self.info),
            "node": self.names[place],
            "node_rank": place,
            "nodes": self.names,
            "ranks_per_node": self.per_node,
            "job_dir": self.job_dir(place),
            "run_dir": str(self.run_dir),
            "leader": "127.0.0.1:9" if leader == "record" else leader,
        }
        self.agents[place] = self._add(Process("agent", config, self.work / f"agent{place}.log", fault))

    def start_rank(self, rank: int, *, cycle: int = 0, fault: str = "", **options: Any) -> None:
        place, local = divmod(rank, self.per_node)
        config = {
            "place": {
                "info": asdict(self.info) | {"cycle": cycle},
                "rank": rank,
                "local_rank": local,
                "node": self.names[place],
                "node_rank": place,
                "ranks_per_node": self.per_node,
                "job_dir": self.job_dir(place),
                "run_dir": str(self.run_dir),
                "leader": "yes",
                "every": None,
                "interval_s": None,
            },
            **options,
        }
        self.ranks[rank] = self._add(Process("rank", config, self.work / f"rank{rank}.log", fault))

    def start(self, faults: dict[str, str] | None = None, **options: Any) -> None:
        """Start everything; ``faults`` by ``leader``, ``agent<place>``, ``rank<rank>``."""
        faults = faults or {}
        self.start_leader(faults.get("leader", ""))
        for place in range(self.count):
            self.start_agent(place, faults.get(f"agent{place}", ""))
        for rank in range(self.info.world_size):
            self.start_rank(rank, fault=faults.get(f"rank{rank}", ""), **options)

    def event(self, name: str, timeout_s: float = 30.0, count: int = 1) -> dict[str, Any]:
        """Wait for an event of the leader."""

        def found() -> dict[str, Any] | None:
            events = [line for line in list(self.leader.lines) if line["event"] == name]
            return events[count - 1] if len(events) >= count else None

        return wait_for(f"event {name}", found, timeout_s)

    def iteration(self, place: int = 0) -> int:
        """Newest iteration of a node's first rank, read from its page."""
        try:
            page = control.ControlPage.open(paths.control(self.job_dir(place)))
        except (OSError, control.DataError):
            return 0
        try:
            return page.words[page.block(0) + control.ITERATION]
        finally:
            page.close()

    def train_to(self, iteration: int, timeout_s: float = 30.0) -> None:
        wait_for(f"iteration {iteration}", lambda: self.iteration() >= iteration, timeout_s)

    def said(self, key: str) -> dict[int, list[Any]]:
        """What each rank has said under a key."""
        return {rank: [line[key] for line in process.lines if key in line] for rank, process in self.ranks.items()}

    def sealed(self) -> dict[int, set[int]]:
        """Ranks with a sealed shard, by iteration, over all nodes."""
        found: dict[int, set[int]] = {}
        for place in range(self.count):
            directory = Path(self.job_dir(place), "manifests")
            for name in directory.iterdir() if directory.is_dir() else ():
                parsed = paths.parse_manifest(name.name)
                if parsed:
                    found.setdefault(parsed[0], set()).add(parsed[1])
        return found

    def complete(self) -> int:
        """Newest iteration that all ranks have sealed."""
        everyone = set(range(self.info.world_size))
        return max((iteration for iteration, ranks in self.sealed().items() if ranks == everyone), default=0)

    def wait_ranks(self, timeout_s: float = 60.0) -> list[int]:
        return [self.ranks[rank].wait(timeout_s) for rank in sorted(self.ranks)]

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.work.glob("*.log")))

    def close(self) -> None:
        for process in self._all:
            if process.running:
                process.signal(signal.SIGCONT)
                process.process.kill()
            if not process.process.stdout.closed:  # type: ignore[union-attr] # a pipe
                process.wait()

    def _add(self, process: Process) -> Process:
        self._all.append(process)
        return process
