"""A private cluster with everything of slurm_resil on it, and a job watched from outside.

Used by quickstart.py, which shows the story, and by the tests in tests/cluster, which take it apart. What is told
about a job here comes from Slurm's records, from the output of the training script and from files, never from what
slurm_resil says about itself.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from slurm_resil.hooks.command import command
from slurm_resil.sandbox import Sandbox, SandboxSpec
from slurm_resil.sandbox.spec import CONTROLLER_ADDRESS

JOBSCRIPTS = Path(__file__).resolve().parent
ROOT = JOBSCRIPTS.parent
ENGINE_PORT = 7321
RANKS = 4
POLL_S = 0.25
USER = "alice"

_LINE = re.compile(r"^(?:\s*0: ?)?(iteration|starting at iteration|stopping at iteration|finished) (\d+)")
_FIELD = re.compile(r"(?:^|\s)([A-Za-z/:]+)=(.*?)(?=\s[A-Za-z/:]+=|$)")


class StoryError(Exception):
    """The story did not go on as it should; says what was waited for and what was seen instead."""


@dataclass(frozen=True)
class Progress:
    """One line of the training script that matters: ``kind`` is ``iteration``, ``start``, ``stop`` or ``finish``."""

    at_s: float
    kind: str
    iteration: int


@dataclass
class Job:
    """A job, as seen from outside.

    Attributes:
        id: Slurm's job id.
        directory: Where it was submitted; its log and its checkpoints are there.
        log: Its output.
        progress: Lines of the training script, with the time at which they were first seen (monotonic, seconds).
        slurm: Changes of Slurm's record: time, state, restarts, nodes.
    """

    id: int
    directory: Path
    log: Path
    progress: list[Progress] = field(default_factory=list)
    slurm: list[tuple[float, str, int, str]] = field(default_factory=list)
    _read: int = 0
    _tail: str = ""

    @property
    def iteration(self) -> int:
        """The last iteration that was trained, 0 before the first."""
        done = [entry.iteration for entry in self.progress if entry.kind == "iteration"]
        return done[-1] if done else 0

    @property
    def starts(self) -> list[int]:
        """What the training script started from, each time."""
        return [entry.iteration for entry in self.progress if entry.kind == "start"]

    @property
    def state(self) -> str:
        """Slurm's state."""
        return self.slurm[-1][1] if self.slurm else "UNKNOWN"

    @property
    def restarts(self) -> int:
        """How often Slurm started the job again."""
        return self.slurm[-1][2] if self.slurm else 0

    @property
    def nodes(self) -> str:
        """Nodes that Slurm gave the job."""
        return self.slurm[-1][3] if self.slurm else ""

    @property
    def running(self) -> bool:
        """Whether the newest start of the training script has trained an iteration, with Slurm calling it running."""
        return self.state == "RUNNING" and bool(self.progress) and self.progress[-1].kind == "iteration"

    def lost(self, start: int) -> int:
        """Iterations that start number ``start`` (from 1) had to train again."""
        index = [at for at, entry in enumerate(self.progress) if entry.kind == "start"][start]
        before = [entry.iteration for entry in self.progress[:index] if entry.kind == "iteration"]
        return max(before) - self.progress[index].iteration

    def gap_s(self, start: int) -> float:
        """Seconds from the last iteration before start number ``start`` to the first one after it."""
        index = [at for at, entry in enumerate(self.progress) if entry.kind == "start"][start]
        before = [entry.at_s for entry in self.progress[:index] if entry.kind == "iteration"]
        after = [entry.at_s for entry in self.progress[index:] if entry.kind == "iteration"]
        return after[0] - before[-1]

    def read_log(self) -> None:
        """Take in what the log has got since the last time."""
        try:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                file.seek(self._read)
                text = file.read()
                self._read = file.tell()
        except FileNotFoundError:
            return
        *lines, self._tail = (self._tail + text).split("\n")
        kinds = {"starting at iteration": "start", "stopping at iteration": "stop", "finished": "finish"}
        for line in lines:
            if match := _LINE.match(line):
                kind = kinds.get(match[1], match[1])
                self.progress.append(Progress(time.monotonic(), kind, int(match[2])))


def tail(path: Path, lines: int = 25) -> str:
    """The end of a file, for a message."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return f"({path} does not exist)"


class Story:
    """A sandbox with prolog, epilog, SPANK plugin and recovery engine.

    Args:
        work: An empty directory that the sandbox's users can reach.
        nodes: Number of nodes, the spares included.
        spares: How many of them are spares.
        spec: More fields of ``SandboxSpec``.
        mode: The engine's mode, or None for no engine.
    """

    def __init__(self, work: Path, *, nodes: int = 5, spares: int = 1, mode: str | None = "act", **spec: Any) -> None:
        self.work = work
        self.bin = Path(sys.prefix) / "bin"
        self.secret = secrets.token_hex(4)
        self.jobs: list[Job] = []
        self.engine: subprocess.Popen[str] | None = None
        self._engine_log: TextIO | None = None
        self._mode = mode
        where = work / "sandbox"
        spec = {"spank": (str(build_spank()),), "grace_time_s": 10, **hooks(work, where), **spec}
        self.sandbox = Sandbox.up(SandboxSpec(dir=where, nodes=nodes, spares=spares, **spec))

    def start(self) -> None:
        """Start the engine."""
        if self._mode is not None:
            self.start_engine()

    def start_engine(self) -> None:
        """Start the recovery engine as root on the login node, and wait until it listens."""
        log = self.work / "engine.log"
        self._engine_log = log.open("a")
        address = f"{CONTROLLER_ADDRESS}:{ENGINE_PORT}"
        argv = [self.bin / "slurm-resil", "engine", "run", "--listen", address, "--db", self.work / "engine.db"]
        argv += ["--mode", str(self._mode), "--spares", "spares"]
        inside = self.sandbox.command([str(part) for part in argv], user="root")
        self.engine = subprocess.Popen(
            inside.argv,
            env=inside.env,
            cwd=inside.cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._engine_log,
            stderr=self._engine_log,
            text=True,
        )
        probe = ["bash", "-c", f"exec 3<>/dev/tcp/{CONTROLLER_ADDRESS}/{ENGINE_PORT}"]

        def listens() -> bool:
            assert self.engine is not None
            if self.engine.poll() is not None:
                raise StoryError(f"the engine ended with {self.engine.returncode}:\n{tail(log)}")
            return self.sandbox.run(probe, check=False).returncode == 0

        self.wait("the engine to listen", listens, timeout_s=20)

    def stop_engine(self) -> None:
        """End the engine."""
        if self.engine is not None:
            self.engine.terminate()
            try:
                self.engine.wait(10)
            except subprocess.TimeoutExpired:
                self.engine.kill()
                self.engine.wait(10)
            self.engine = None
        if self._engine_log is not None:
            self._engine_log.close()

    def close(self) -> None:
        """Take everything down."""
        self.stop_engine()
        self.sandbox.down()

    # -- jobs

    def submit(
        self,
        name: str,
        arguments: Sequence[str] = (),
        *,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        files: Sequence[Path] = (),
        script: Callable[[str], str] = str,
    ) -> Job:
        """Submit the example as it is, in a directory of its own on the shared file system, as a user.

        Args:
            name: Name of the directory.
            arguments: For train_gpt.py.
            options: For sbatch.
            env: Added to the environment of sbatch, and so of the job.
            files: More files to put beside the script.
            script: Changes the text of the batch script.
        """
        directory = self.sandbox.pfs / USER / name
        make = 'mkdir -p -- "$1" && cat > "$1/train_gpt.sbatch"'
        text = script((JOBSCRIPTS / "train_gpt.sbatch").read_text())
        self.sandbox.run(["bash", "-c", make, "bash", str(directory)], user=USER, stdin=text)
        for path in (JOBSCRIPTS / "train_gpt.py", *files):
            shutil.copy(path, directory / path.name)
            (directory / path.name).chmod(0o644)
        argv = ["sbatch", "--parsable", *options, "train_gpt.sbatch", *arguments]
        done = self.sandbox.run(argv, user=USER, cwd=directory, env=self.user_env() | dict(env or {}))
        number = int(done.stdout.strip().split(";")[0])
        job = Job(id=number, directory=directory, log=directory / f"train_gpt-{number}.log")
        self.jobs.append(job)
        return job

    def user_env(self) -> dict[str, str]:
        """What a user of such a site has in the environment."""
        env = {
            "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.sandbox.pfs / USER),  # goes with the sandbox
            "SLURM_RESIL_BB_ROOT": str(self.sandbox.bb),
        }
        if self._mode is not None:
            env["SLURM_RESIL_ENGINE"] = f"{CONTROLLER_ADDRESS}:{ENGINE_PORT}"
        return env

    def scontrol(self, *arguments: str, check: bool = True) -> str:
        """Run scontrol as root."""
        return self.sandbox.run(["scontrol", *arguments], check=check).stdout

    def record(self, job: Job) -> dict[str, str]:
        """Slurm's record of a job; empty when slurmctld does not answer or has forgotten it."""
        text = self.scontrol("-o", "show", "job", str(job.id), check=False)
        return {match[1]: match[2] for match in _FIELD.finditer(text.strip())}

    def node(self, name: str) -> dict[str, str]:
        """Slurm's record of a node."""
        text = self.scontrol("-o", "show", "node", name, check=False)
        return {match[1]: match[2] for match in _FIELD.finditer(text.strip())}

    def node_names(self, nodes: str) -> list[str]:
        """Expand a host list."""
        return self.scontrol("show", "hostnames", nodes).split()

    def cancel(self, job: Job) -> None:
        """End a job."""
        self.sandbox.run(["scancel", str(job.id)], check=False)

    # -- watching

    def observe(self) -> None:
        """Look once at all jobs."""
        for job in self.jobs:
            job.read_log()
            record = self.record(job)
            if "JobState" in record:
                nodes = record.get("NodeList", "").replace("(null)", "")
                new = (record["JobState"], int(record.get("Restarts", "0")), nodes)
                if not job.slurm or job.slurm[-1][1:] != new:
                    job.slurm.append((time.monotonic(), *new))

    def wait(self, what: str, reached: Callable[[], bool], *, timeout_s: float, job: Job | None = None) -> None:
        """Look until something is so.

        Raises:
            StoryError: It is not so in time, or the job has ended before.
        """
        end = time.monotonic() + timeout_s
        while True:
            self.observe()
            if reached():
                return
            bad = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED", "OUT_OF_MEMORY")
            over = job is not None and job.state in bad
            if over:
                self.observe()  # once more: what was printed at the very end
                if reached():
                    return
            if over or time.monotonic() > end:
                seen = "" if job is None else self.describe(job)
                why = "the job ended" if over else f"it took over {timeout_s:g} s"
                raise StoryError(f"waited for {what}: {why}{seen}")
            time.sleep(POLL_S)

    def wait_training(self, job: Job, *, starts: int, beyond: int = 1, timeout_s: float = 90) -> None:
        """Wait until start number ``starts`` (from 1) of the training script has trained ``beyond`` iterations."""

        def reached() -> bool:
            return len(job.starts) >= starts and job.running and job.iteration >= job.starts[-1] + beyond

        self.wait(f"start {starts} of the training to get going", reached, timeout_s=timeout_s, job=job)

    def wait_end(self, job: Job, *, timeout_s: float) -> None:
        """Wait until the job is over, well."""

        def ended() -> bool:
            return job.state == "COMPLETED" and any(entry.kind == "finish" for entry in job.progress)

        self.wait("the end of the training", ended, timeout_s=timeout_s, job=job)

    def describe(self, job: Job) -> str:
        """What is known about a job, for a message."""
        record = self.record(job)
        words = " ".join(
            f"{key}={record.get(key)}" for key in ("JobState", "Reason", "Restarts", "NodeList", "ExitCode")
        )
        return f"\n  job {job.id}: {words}\n  starts {job.starts}, iteration {job.iteration}\n{tail(job.log)}"

    # -- results

    def durable(self, job: Job) -> list[int]:
        """Iterations of the published files on the shared file system, oldest first."""
        names = [path.stem.removeprefix("ckpt-") for path in job.directory.glob(".slurm-resil/*/ckpt-*.json")]
        return sorted(int(name) for name in names)


class Reference:
    """The same training without Slurm, faults and checkpoints: one process per rank on this host.

    Args:
        work: Directory for its digests and its log.
        arguments: For train_gpt.py.
        nice: How much it yields to others.
    """

    def __init__(self, work: Path, arguments: Sequence[str], *, nice: int = 0) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.log = work / "reference.log"
        self.digests = work / "reference"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        argv = ["nice", "-n", str(nice), sys.executable, str(JOBSCRIPTS / "train_gpt.py"), "--plain"]
        argv += ["--digest", str(self.digests), *arguments]
        common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self.log.open("wb") as log:
            self.ranks = [
                subprocess.Popen(
                    argv,
                    env={**os.environ, **common, "RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
                for rank in range(RANKS)
            ]

    def wait(self, *, timeout_s: float) -> None:
        """Wait for all ranks.

        Raises:
            StoryError: One failed, or it took too long.
        """
        end = time.monotonic() + timeout_s
        try:
            codes = [rank.wait(max(0.1, end - time.monotonic())) for rank in self.ranks]
        except subprocess.TimeoutExpired as error:
            raise StoryError(f"the reference run took over {timeout_s:g} s:\n{tail(self.log)}") from error
        finally:
            self.close()
        if any(codes):
            raise StoryError(f"the reference run failed:\n{tail(self.log)}")

    def close(self) -> None:
        """End what still runs."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


def compare(one: Path, other: Path) -> list[str]:
    """Compare the digests of all ranks of two runs; return what differs, empty if every bit is the same."""
    different = []
    for rank in range(RANKS):
        left, right = (json.loads(Path(f"{path}.{rank}").read_text()) for path in (one, other))
        names = left["parts"].keys() | right["parts"].keys()
        odd = sorted(name for name in names if left["parts"].get(name) != right["parts"].get(name))
        different += [f"rank {rank}: {name}" for name in odd]
        if left["iteration"] != right["iteration"]:
            different.append(f"rank {rank}: iteration {left['iteration']} and {right['iteration']}")
    return different


def hooks(work: Path, sandbox: Path) -> dict[str, Path]:
    """Write the site's prolog and epilog, as `slurm-resil site render` does."""
    config = work / "hooks.json"
    config.write_text(json.dumps({"bb_root": str(sandbox / "bb"), "log": str(work / "hooks.log")}))
    found = {}
    for name in ("prolog", "epilog"):
        script = work / f"{name}.sh"
        script.write_text(f"#!/bin/sh\nexec {shlex.join(command(name, str(config)))}\n")
        script.chmod(0o755)
        found[name] = script
    return found


def build_spank() -> Path:
    """Compile the SPANK plugin.

    Raises:
        StoryError: It does not compile.
    """
    done = subprocess.run(["make", "-C", str(ROOT / "spank")], capture_output=True, text=True, check=False)
    found = sorted((ROOT / "spank").glob("*.so"))
    if done.returncode != 0 or not found:
        raise StoryError(f"the SPANK plugin does not compile:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found[0]
