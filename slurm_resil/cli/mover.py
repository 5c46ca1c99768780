"""``slurm-resil mover``: short MPI programs over the nodes of a job, one process per node."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

import click

from slurm_resil.cli.prune import retention
from slurm_resil.comm import mpi
from slurm_resil.comm.base import Communicator
from slurm_resil.comm.local import LocalCommunicator
from slurm_resil.core import errors
from slurm_resil.core.errors import ResilError, UsageError
from slurm_resil.core.retention import Retention
from slurm_resil.drain import priority
from slurm_resil.drain.collective import BUFFER_BYTES, Options, Outcome, Progress, drain
from slurm_resil.launch.retain import Pruner

REPORT_EVERY_S = 1.0


class Stop:
    """Set by a signal, asked by the drain.

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
        self._bar: Any = None
        self._task: Any = None

    def line(self, event: str, **fields: object) -> None:
        """Print an event."""
        if self._quiet:
            return
        self.close()
        if self._json:
            click.echo(json.dumps({"event": event, **fields}))
        else:
            click.echo(event + "".join(f" {key}={value}" for key, value in fields.items()))

    def progress(self, progress: Progress) -> None:
        """Show how far it is, about once a second."""
        if self._quiet:
            return
        if not self._json and sys.stdout.isatty():
            self._draw(progress)
            return
        now = time.monotonic()
        if progress.phase == self._phase and now - self._last < REPORT_EVERY_S:
            return
        self._phase, self._last = progress.phase, now
        self.line("progress", phase=progress.phase, bytes=progress.done_bytes, total=progress.total_bytes)

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
        self._bar.update(self._task, completed=progress.done_bytes)

    def close(self) -> None:
        """Leave the terminal in order."""
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._phase = None, ""


def _iteration(_: object, __: object, value: str) -> int | None:
    if value == "newest":
        return None
    if not value.isdigit():
        raise click.BadParameter(f"{value!r} is neither a number nor 'newest'")
    return int(value)


def _hints(_: object, __: object, values: tuple[str, ...]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for key, equals, _value in pairs:
        if not key or not equals:
            raise click.BadParameter(f"{key!r} is not like romio_cb_write=disable")
    return {key: value for key, _, value in pairs}


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


def report(screen: Screen, outcome: Outcome) -> None:
    """Print the last line."""
    manifest = outcome.manifest
    screen.line(
        "drained",
        iteration=manifest.iteration,
        bytes=sum(item.nbytes for item in manifest.items),
        seconds=round(outcome.seconds, 4),
        written_bytes=[] if outcome.already else list(manifest.written_bytes),
        already=outcome.already,
        file=manifest.file,
        costs_s={} if outcome.already else manifest.costs_s,
    )


@click.group()
def mover() -> None:
    """Move checkpoints between burst buffers and the parallel file system (started by the launcher over MPI)."""


@mover.command("drain")
@click.option("--run-dir", required=True, help="The run's directory on the parallel file system.")
@click.option("--job-dir", required=True, help="The job's directory in each node's burst buffer.")
@click.option("--iteration", default="newest", callback=_iteration, show_default=True, help="A number, or 'newest'.")
@click.option("--cap", type=click.FloatRange(min=1), help="Limit of all movers together, bytes/s.")
@click.option("--buffer", "buffer_bytes", type=int, default=BUFFER_BYTES, show_default=True, help="Bytes per round.")
@click.option("--hint", "hints", multiple=True, callback=_hints, help="MPI-IO hint KEY=VALUE; repeatable.")
@click.option("--transport", type=click.Choice(("auto", "mpi", "local")), default="auto", show_default=True)
@click.option("--nice/--no-nice", "nice", default=True, show_default=True, help="Low processor and disk priority.")
@click.option(
    "--on-term",
    type=click.Choice(("stop", "finish")),
    default="stop",
    show_default=True,
    help="What SIGTERM means. Slurm sends it to every step when a grace period starts: 'finish' then goes on.",
)
@click.option("--prune", "prunes", is_flag=True, help="Then delete what the retention settings do not keep.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines; the last one has the event 'drained' or 'failed'.")
def drain_command(
    run_dir: str,
    job_dir: str,
    iteration: int | None,
    cap: float | None,
    buffer_bytes: int,
    hints: dict[str, str],
    transport: str,
    nice: bool,
    on_term: str,
    prunes: bool,
    as_json: bool,
) -> None:
    """Write one checkpoint into one file of global tensors, verify and publish it.

    One process per node, all with the same arguments. Ends with 0 when the checkpoint is durable (also when it was
    before), 65 when a shard is damaged, 75 when not all ranks have sealed, another mover is at it, or SIGTERM or SIGINT
    stopped it, 78 when a directory is missing, 1 when storage refuses. Nothing is published unless it ends with 0.
    """
    from slurm_resil.drain.skeleton import skeleton  # h5py: not for --help

    rules = retention(os.environ) if prunes else Retention()

    options = Options(buffer_bytes=buffer_bytes, cap_bytes_s=cap, hints=hints, owner=os.path.basename(job_dir))
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
        outcome = drain(
            comm,
            run_dir=run_dir,
            job_dir=job_dir,
            iteration=iteration,
            skeleton=skeleton,
            options=options,
            stop=stop,
            progress=screen.progress,
            traces=stop.traces,
        )
    except UsageError:
        raise
    except ResilError as error:  # the same on every rank
        # whoever ends first with it makes Slurm end the others: their exit code is to be the same
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        screen.close()
        if as_json:
            error.told = True
            screen.line("failed", error=str(error), exit_code=error.exit_code, retryable=error.retryable)
        if comm.rank == 0:
            raise
        sys.exit(error.exit_code)
    except Exception:  # noqa: BLE001 - a fault of the program: the other ranks would wait for ever
        traceback.print_exc()
        comm.abort(errors.EXIT_FAILED)
    if rules.deletes and comm.rank == 0:
        _prune(screen, run_dir, rules)
    report(screen, outcome)


def _prune(screen: Screen, run_dir: str, rules: Retention) -> None:
    """Delete old checkpoints. The new one is durable, whatever comes of this."""
    try:
        done = Pruner(run_dir, rules).prune()
    except ResilError as error:
        screen.line("prune_failed", error=str(error))
        return
    left = {str(iteration): why for iteration, why in (done.left | done.failed).items()}
    screen.line("pruned", iterations=done.deleted, bytes=done.nbytes, left=left)
