"""Processes that the launcher starts: a protocol, and its forms with srun and with plain local processes.

Each step is watched by threads of its own; what they learn goes to callbacks. Nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

from slurm_resil.launch.commands import Command
from slurm_resil.launch.verdict import TaskEnd, Verdict, judge, parse_line

KEEP_LINES = 500
KILL_WAITS_S = (1.0, 1.0, 2.0)  # after each request to kill a step; then srun is interrupted, and in the end killed
NOISE = ("srun: cluster configuration lacks support for cpu binding",)

SlurmKill = Callable[[Callable[[], bool]], None]  # asks Slurm to kill a step; gets whether that is still wanted


class Step(Protocol):
    """Something that runs on nodes."""

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        ...

    def kill(self) -> None:
        """Have it end by SIGKILL; returns at once."""
        ...

    def abandon(self) -> None:
        """End what runs here, and leave what runs elsewhere to Slurm."""
        ...

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; its exit code as from subprocess, None if it still runs."""
        ...


class Process:
    """A process in a session of its own, with its standard error read line by line.

    Args:
        command: What to start.
        stdout: Where standard output goes: None is the launcher's own, or a file, or ``"pipe"`` to collect it.
        stderr: Where standard error is forwarded; default: the launcher's own.
        quiet: Forward nothing.
        line: Called for each line of standard error, in a thread.
        said: Called for each line of standard output, if it is collected, in a thread.
        ended: Called with this object and the exit code, in a thread, after the last line.
        slurm_kill: Asks Slurm to kill the step of this srun; None for a plain process.
        doom_s: An srun's task that ended badly takes the others along: at once if a signal ended it, after so many
            seconds if it exited with a code; None: it does not.

    Attributes:
        out: Lines of standard output, if it is collected.
        lines: The first lines of standard error.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self,
        command: Command,
        *,
        stdout: IO[bytes] | str | None = None,
        stderr: IO[bytes] | None = None,
        quiet: bool = False,
        line: Callable[[str], None] | None = None,
        said: Callable[[str], None] | None = None,
        ended: Callable[[Process, int], None] | None = None,
        slurm_kill: SlurmKill | None = None,
        doom_s: float | None = None,
    ) -> None:
        self.command = command
        self.out: deque[str] = deque(maxlen=KEEP_LINES)
        self.lines: list[str] = []
        self._forward = None if quiet else stderr if stderr is not None else sys.stderr.buffer
        self._line, self._said, self._ended = line, said, ended
        self._slurm_kill, self._doom_s = slurm_kill, doom_s
        self._killing, self._doomed = threading.Lock(), False
        self._process = subprocess.Popen(
            command.argv,
            env=dict(command.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if isinstance(stdout, str) else stdout,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        threads = [threading.Thread(target=self._read_err, daemon=True)]
        if isinstance(stdout, str):
            threads.append(threading.Thread(target=self._read_out, daemon=True))
        self._readers = threads
        for thread in threads:
            thread.start()
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """See Step."""
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> int | None:
        """See Step."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def kill(self, *, delay_s: float = 0.0) -> None:
        """See Step. Of an srun: by Slurm, then by an interrupt (srun kills the step itself), then without the step."""
        threading.Thread(target=self._kill, args=(delay_s,), name="kill", daemon=True).start()

    def abandon(self) -> None:
        """See Step. An srun that lived on would kill its step by number, and the next attempt's have the same."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal to the process itself, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _kill(self, delay_s: float) -> None:
        if delay_s and self.wait(delay_s) is not None:
            return
        if not self._killing.acquire(blocking=False):
            return  # already at it
        if self._slurm_kill is not None:
            if self._ask_slurm():
                return
            self.send(signal.SIGINT)
            if self._ask_slurm():
                return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ask_slurm(self) -> bool:
        """Ask Slurm to kill the step, a few times; whether it has ended.

        One request is not enough for a step that starts: of several signals that reach a slurmstepd by then, such as
        those of a preemption and ours, it delivers one, and each of the others only when the step ends or after a
        minute; and where control groups do not track processes, SIGKILL misses a task that is not executed yet.
        """
        for wait_s in KILL_WAITS_S:
            threading.Thread(target=self._ask_once, name="ask", daemon=True).start()
            if self.wait(wait_s) is not None:
                return True
        return False

    def _ask_once(self) -> None:
        """Thread: Slurm's command waits as long as what it asks for does."""
        assert self._slurm_kill is not None
        with contextlib.suppress(Exception):  # it is one of several ways
            self._slurm_kill(lambda: self.running)

    def _read_err(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            text = raw.decode(errors="replace").rstrip("\n")
            if text in NOISE:
                continue
            if self._forward is not None:
                with contextlib.suppress(OSError, ValueError):  # nobody reads any more: the ranks go on
                    self._forward.write(raw)
                    self._forward.flush()
            if len(self.lines) < KEEP_LINES:
                self.lines.append(text)
            if self._line is not None:
                self._line(text)
            if self._doom_s is not None:
                self._doom(parse_line(text), self._doom_s)

    def _doom(self, end: TaskEnd | None, wait_s: float) -> None:
        if end is not None and (end.signal or not self._doomed):
            self._doomed = True
            self.kill(delay_s=0.0 if end.signal else wait_s)

    def _read_out(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            text = raw.decode(errors="replace").rstrip("\n")
            self.out.append(text)
            if self._said is not None:
                self._said(text)

    def _wait(self) -> None:
        code = self._process.wait()
        for thread in self._readers:
            thread.join(timeout=2.0)  # a grandchild may hold the pipe
        if self._ended is not None:
            self._ended(self, code)


class Ranks:
    """The ranks of a cycle under one srun: the first that fails takes all the others along.

    Args:
        command: See commands.ranks.
        ended: Called with the verdict.
        slurm_kill: Asks Slurm to kill the step.
        stdout: For tests: where the output goes.
        stderr: For tests.
    """

    def __init__(
        self,
        command: Command,
        *,
        ended: Callable[[Verdict], None],
        slurm_kill: SlurmKill,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self._ended = ended
        self._own: list[str] = []  # srun's own lines; tasks may print more than anybody would keep
        self._process = Process(
            command,
            stdout=stdout,
            stderr=stderr,
            line=self._hear,
            ended=self._end,
            slurm_kill=slurm_kill,
            doom_s=0.0,
        )

    @property
    def running(self) -> bool:
        """See Step."""
        return self._process.running

    def kill(self) -> None:
        """See Step."""
        self._process.kill()

    def abandon(self) -> None:
        """See Step."""
        self._process.abandon()

    def wait(self, timeout_s: float) -> int | None:
        """See Step."""
        return self._process.wait(timeout_s)

    def _hear(self, line: str) -> None:
        if line.startswith("srun: ") and len(self._own) < KEEP_LINES:
            self._own.append(line)

    def _end(self, _: Process, code: int) -> None:
        self._ended(judge(self._own, code))


class LocalRanks:
    """The ranks of a cycle as processes of this host.

    Args:
        commands: One per rank, by rank.
        node: Name of this host in the layout.
        ended: Called with the verdict once all have ended.
    """

    def __init__(self, commands: Sequence[Command], *, node: str, ended: Callable[[Verdict], None]) -> None:
        self._node, self._ended = node, ended
        self._lock = threading.Lock()
        self._first: TaskEnd | None = None
        self._killed = False
        self._left = len(commands)
        self._processes: list[Process] = []
        with self._lock:  # none may report its end before all are there
            for rank, command in enumerate(commands):
                ended_one = self._ender(rank)
                self._processes.append(Process(command, ended=ended_one))

    @property
    def running(self) -> bool:
        """See Step."""
        return self._left > 0

    def kill(self) -> None:
        """See Step."""
        self._killed = True
        for process in self._processes:
            process.kill()

    def abandon(self) -> None:
        """See Step."""
        for process in self._processes:
            process.abandon()

    def wait(self, timeout_s: float) -> int | None:
        """See Step."""
        limit = time.monotonic() + timeout_s
        codes = [process.wait(max(0.0, limit - time.monotonic())) for process in self._processes]
        return None if None in codes else max(abs(code or 0) for code in codes)

    def _ender(self, rank: int) -> Callable[[Process, int], None]:
        return lambda _, code: self._end(rank, code)

    def _end(self, rank: int, code: int) -> None:
        with self._lock:
            self._left -= 1
            first = self._first
            # a rank that loses a peer ends with Python's 1, and may be reaped before it: another end is the cause
            cause = first is not None and first.code == 1 and code not in (1, -signal.SIGKILL)
            if code and (first is None or cause):
                number = -code if code < 0 else None
                exit_code = 128 + number if number else code
                how = f"was killed by {signal.Signals(number).name}" if number else f"exited with code {code}"
                self._first = TaskEnd(node=self._node, task=rank, code=exit_code, signal=number, how=how)
                for process in self._processes:
                    process.kill()
            if self._left:
                return
            first = self._first
        if first is None:
            self._ended(Verdict(code=0, words="all ranks ended well"))
            return
        words = f"rank {first.task} on {first.node} {first.how}"
        self._ended(
            Verdict(
                code=first.code, task=first.task, rank=first.task, node=first.node, signal=first.signal, words=words
            )
        )


def last_json(lines: Sequence[str]) -> Mapping[str, object]:
    """The last JSON object among lines, empty if there is none."""
    return next((value for line in reversed(lines) if (value := as_json(line)) is not None), {})


def as_json(line: str) -> Mapping[str, object] | None:
    """The JSON object that a line is; None if it is none."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                return value
    return None
