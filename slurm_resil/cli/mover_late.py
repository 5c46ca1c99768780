"""``slurm-resil mover late``: make durable what a job that is gone has left on this node."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping

import click

from slurm_resil.cli.moving import Screen, Stop, run
from slurm_resil.comm.base import Communicator
from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import ConfigError, ResilError, TryAgainError
from slurm_resil.drain.choosing import Own, drop
from slurm_resil.drain.late import WAIT_S, Late, Options, Outcome
from slurm_resil.hooks.epilog import clear
from slurm_resil.launch.records import EventLog

_LOOK_S = 1.0


@click.command("late")
@click.option("--job-dir", required=True, help="The job's directory in this node's burst buffer.")
@click.option("--cap", type=click.FloatRange(min=1), help="Limit of all nodes together, bytes/s.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=WAIT_S,
    show_default=True,
    help="Seconds that other nodes are waited for that do not get on.",
)
@click.option("--limit", "limit_s", type=click.FloatRange(min=1), help="Seconds after which it ends, whatever is done.")
@click.option("--clear", "clears", is_flag=True, help="Then empty the directory, as the epilog does.")
@click.option("--nice/--no-nice", "nice", default=True, show_default=True, help="Low processor and disk priority.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines; the last one has the event 'late' or 'failed'.")
def late_command(
    job_dir: str,
    cap: float | None,
    wait_s: float,
    limit_s: float | None,
    clears: bool,
    nice: bool,
    as_json: bool,
) -> None:
    """Make durable what a job that is gone has left on this node, together with the same command on its other nodes.

    No MPI: the nodes may come at different times, and find each other in the run's directory. Ends with 0 when the
    newest checkpoint that is complete is durable, 65 when nothing is whole, 75 when others are missing, when it was
    stopped or when the job goes on; what was written then is gone on with by whoever comes next.
    """
    from slurm_resil.drain.skeleton import skeleton  # h5py: not for --help

    own = Own.read(job_dir)
    events = EventLog(own.run_dir, own.attempt)

    def tell(event: str, **fields: object) -> None:
        events.write(f"late_{event}", node=own.node, job_id=own.job_id, **fields)

    def work(_: Communicator, stop: Stop, screen: Screen) -> Outcome:
        asked = _Asked(own, job_dir, stop, limit_s)

        def say(event: str, fields: Mapping[str, object]) -> None:
            screen.line(event, **fields)
            if event != "retry":
                tell(event, **fields)

        with _alone(job_dir):
            late = Late(
                own,
                job_dir,
                skeleton=skeleton,
                options=Options(cap_bytes_s=cap, wait_s=wait_s),
                stop=asked,
                progress=screen.progress,
                tell=say,
            )
            try:
                outcome = late.run()
            except ResilError as error:
                why = asked.why or error.message
                if asked.over:
                    why = asked.why = f"{why}: {late.waits or 'at work'}"
                    drop(own, late.newest, why, kept=True)
                tell("failed", why=why)
                if asked.why:
                    raise TryAgainError(asked.why, mend="what was written is gone on with") from error
                raise
            if clears:
                _clear(own, job_dir)
            return outcome

    outcome, _, screen = run(work, transport="local", nice=nice, on_term="stop", as_json=as_json)
    manifest = outcome.manifest
    screen.line(
        "late",
        iteration=manifest.iteration if manifest else None,
        file=manifest.file if manifest else None,
        written_bytes=outcome.written_bytes,
        seconds=round(outcome.seconds, 4),
    )


class _Asked:
    """Whether to stop: a signal, the time is over, or the job is there again.

    Attributes:
        why: Why, in words, if it was no signal.
        over: Whether it was the time.
    """

    def __init__(self, own: Own, job_dir: str, stop: Callable[[], bool], limit_s: float | None) -> None:
        self._own, self._job_dir, self._stop, self._limit_s = own, job_dir, stop, limit_s
        self._began = self._looked = time.monotonic()
        self.why, self.over = "", False

    def __call__(self) -> bool:
        now = time.monotonic()
        if self._limit_s is not None and now - self._began > self._limit_s:
            self.over = self.over or not self.why
            self.why = self.why or f"it is not done in {self._limit_s:g} s"
        if now - self._looked > _LOOK_S:
            self._looked = now
            self.why = self.why or _goes_on(self._own, self._job_dir)
        return bool(self.why) or self._stop()


def _goes_on(own: Own, job_dir: str) -> str:
    """Why the directory is somebody else's now; empty: it is not."""
    if os.path.lexists(paths.continues(job_dir)):
        return "the run goes on under this job id"
    try:
        if Own.read(job_dir) != own:
            return "another attempt is at work here"
    except ConfigError as error:
        return error.message
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.connect(paths.agent_socket(job_dir))
        return "the agent of the job is at work"
    return ""


@contextlib.contextmanager
def _alone(job_dir: str) -> Iterator[None]:
    """Hold this node's lock.

    Raises:
        TryAgainError: Another process has it.
        ConfigError: There is something else in its place.
    """
    path = paths.late_lock(job_dir)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {error.strerror}", mend="remove it", path=path) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise TryAgainError(f"another late drain is at work in {job_dir}", mend="wait for its end") from error
    try:
        yield
    finally:
        os.close(fd)


def _clear(own: Own, job_dir: str) -> None:
    """Empty the directory, unless something in it is needed; what remains is the epilog's or a person's."""
    if _goes_on(own, job_dir):
        return
    with contextlib.suppress(OSError):
        with fsio.open_dir(job_dir) as fd:
            code = clear(fd)
        if code == 0:
            os.rmdir(job_dir)
