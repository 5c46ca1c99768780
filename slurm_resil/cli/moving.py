"""What the commands of ``slurm-resil mover`` share: signals, transport, reports, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import click

from slurm_resil.comm import mpi
from slurm_resil.comm.base import Communicator
from slurm_resil.comm.local import LocalCommunicator
from slurm_resil.core import errors, priority
from slurm_resil.core.errors import ResilError, UsageError
from slurm_resil.core.progress import Progress

REPORT_EVERY_S = 1.0
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Stop:
    """Set by a signal, asked by what runs.

    A rank that waits inside MPI for one that is dead never gets to ask: a thread, which hears of the signal all the
    same, then ends the process.

    Attributes:
        traces: Files that are removed in that case.
    """

    GRACE_S = 5.0

    def __init__(self) -> None:
        self._asked = False
        self.traces: list[str] = []

    def __call__(self) -> bool:
        """Whether a signal came."""
        return self._asked

    def on(self, *signals: signal.Signals) -> None:
        """Let signals ask; one that the parent made ignored stays ignored."""
        ear, mouth = os.pipe()
        os.set_blocking(mouth, False)
        signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        for one in signals:
            if signal.getsignal(one) is not signal.SIG_IGN:
                signal.signal(one, self._ask)
        threading.Thread(target=self._watch, args=(ear,), name="stop", daemon=True).start()

    def _ask(self, *_: object) -> None:
        self._asked = True

    def _watch(self, ear: int) -> None:
        os.read(ear, 1)
        time.sleep(self.GRACE_S)
        for path in self.traces:
            with contextlib.suppress(OSError):
                os.unlink(path)
        os._exit(errors.EXIT_TRY_AGAIN)


class Screen:
    """Reports of rank 0: JSON lines, a bar on a terminal, or plain lines."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self._json, self._quiet = as_json, quiet
        self._phase, self._last = "", float("-inf")
        self._lock = threading.Lock()
        self._bar: Any = None
        self._task: Any = None

    def line(self, event: str, **fields: object) -> None:
        """Print an event, on rank 0."""
        if not self._quiet:
            self.line_of_any(event, **fields)

    def line_of_any(self, event: str, **fields: object) -> None:
        """Print an event, on any rank, in any thread."""
        if self._json:
            text = json.dumps({"event": event, **fields})
        else:
            text = event + "".join(f" {key}={value}" for key, value in fields.items())
        with self._lock:
            self.close()
            sys.stdout.write(f"{text}\n")  # one write: lines of several ranks do not mix
            sys.stdout.flush()

    def progress(self, progress: Progress) -> None:
        """Show how far it is, about once a second."""
        if self._quiet:
            return
        if not self._json and sys.stdout.isatty():
            with self._lock:
                self._draw(progress)
            return
        now = time.monotonic()
        if progress.phase == self._phase and now - self._last < REPORT_EVERY_S:
            return
        self._phase, self._last = progress.phase, now
        self.line(
            "progress",
            phase=progress.phase,
            bytes=progress.done_bytes,
            total=progress.total_bytes,
            rate_bytes_s=round(progress.rate_bytes_s),
            left_s=None if progress.left_s is None else round(progress.left_s, 1),
            waits=progress.waits,
        )

    def _draw(self, progress: Progress) -> None:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            text = TextColumn("{task.description}")
            self._bar = Bar(text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar.start()
        if progress.phase != self._phase:
            self._phase = progress.phase
            self._task = self._bar.add_task(progress.phase, total=progress.total_bytes)
        words = f"{progress.phase} (waits: {progress.waits})" if progress.waits else progress.phase
        self._bar.update(self._task, completed=progress.done_bytes, description=words)

    def close(self) -> None:
        """Leave the terminal in order."""
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._phase = None, ""


def iteration_option(_: object, __: object, value: str) -> int | None:
    """Read a number, or ``newest``."""
    if value == "newest":
        return None
    if not (value.isascii() and value.isdigit()):
        raise click.BadParameter(f"{value!r} is neither a number nor 'newest'")
    return int(value)


def communicator(transport: str) -> Communicator:
    """The movers of this launch.

    Args:
        transport: ``mpi``, ``local`` (this process alone) or ``auto``: MPI if a launcher of MPI started us.

    Raises:
        ConfigError: MPI is asked for and missing.
    """
    if transport == "mpi" or (transport == "auto" and mpi.launched(os.environ)):
        return mpi.world()
    return LocalCommunicator()


def run(
    work: Callable[[Communicator, Stop, Screen], T], *, transport: str, nice: bool, on_term: str, as_json: bool
) -> tuple[T, Communicator, Screen]:
    """Run collective work as a command: the same end, exit code and last line on every rank.

    Args:
        work: Raises the same error on every rank, or none on any.
        transport: See :func:`communicator`.
        nice: Lower the priority for processor and disk.
        on_term: ``stop`` or ``finish``: what SIGTERM means.
        as_json: Print JSON lines.

    Returns:
        What the work returned, and what it ran on.

    Raises:
        ResilError: The work's, on rank 0; the other ranks exit with its code.
    """
    stop = Stop()
    for one in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_IGN)  # notices of Slurm, for the agents
    if on_term == "finish":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    comm = communicator(transport)
    stop.on(signal.SIGTERM, signal.SIGINT)
    if nice:
        priority.lower()
    screen = Screen(as_json=as_json, quiet=comm.rank != 0)
    try:
        return work(comm, stop, screen), comm, screen
    except UsageError:
        raise
    except ResilError as error:  # the same on every rank
        # whoever ends first with it makes Slurm end the others: their exit code is to be the same
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        screen.close()
        if as_json:
            error.told = True
            kind = type(error).__name__
            screen.line("failed", error=str(error), kind=kind, exit_code=error.exit_code, retryable=error.retryable)
        if comm.rank == 0:
            raise
        sys.exit(error.exit_code)
    except Exception:  # noqa: BLE001 - a fault of the program: the other ranks would wait for ever
        traceback.print_exc()
        comm.abort(errors.EXIT_FAILED)


_ON_TERM = "What SIGTERM means. Slurm sends it to every step when a grace period starts: 'finish' then goes on."
_OPTIONS = (
    click.option("--run-dir", required=True, help="The run's directory on the parallel file system."),
    click.option("--job-dir", required=True, help="The job's directory in each node's burst buffer."),
    click.option(
        "--iteration", default="newest", callback=iteration_option, show_default=True, help="A number, or 'newest'."
    ),
    click.option("--cap", type=click.FloatRange(min=1), help="Limit of all movers together, bytes/s."),
    click.option("--transport", type=click.Choice(("auto", "mpi", "local")), default="auto", show_default=True),
    click.option("--nice/--no-nice", "nice", default=True, show_default=True, help="Low processor and disk priority."),
    click.option("--on-term", type=click.Choice(("stop", "finish")), default="stop", show_default=True, help=_ON_TERM),
)


def mover_options(command: F) -> F:
    """Options that all movers have."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
