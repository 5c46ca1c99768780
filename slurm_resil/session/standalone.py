"""Saves without a Checkpointer: ``async_save`` copies the state into the burst buffer; the rest is beside training.

Works on each rank for itself, with or without a process group. The ranks agree on the number of a save through the
process group's store; there is no collective, in the background or elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import operator
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, get_args

from slurm_resil.ckpt import saved, seal
from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.memo import Memo
from slurm_resil.ckpt.ranks import Ranks
from slurm_resil.ckpt.saved import Save
from slurm_resil.ckpt.snapshot import Arena
from slurm_resil.core import config, faults, fsio, ids, paths
from slurm_resil.core.background import Background
from slurm_resil.core.errors import ConfigError, ResilError, ServiceError, TryAgainError, UsageError, missing_path
from slurm_resil.core.settings import Settings
from slurm_resil.format.manifest import ShardManifest, digest
from slurm_resil.session.checkpointer import Backpressure

SLOTS = 2  # saves in flight at most: each holds a slot from its call until it is durable
WAIT_S = 600.0  # for a slot, with backpressure="wait"
EXIT_WAIT_S = 600.0  # at the end of the process, for saves that are not durable yet
_KEYS = 1000  # of the store, that stay
log = logging.getLogger(__name__)


class Handle:
    """What becomes of one save on this rank. Each level is a future; an error is that of every level not reached.

    Attributes:
        iteration: Number of the checkpoint.
        path: Directory of this save.
        staged: Done when the tensors may change again. Gives None.
        local: Done when this rank's shard is sealed in the burst buffer. Gives None.
        protected: Done when this rank's shard survives the loss of this node. Nobody keeps copies on other nodes for
            ``async_save``, so that is when it is durable. Gives None.
        durable: Done when this rank's shard is in ``path``, read back and compared with its hashes. Gives ``path``.
    """

    def __init__(self, save: Save, rank: int) -> None:
        self._save, self._rank = save, rank
        self.iteration, self.path = save.iteration, save.path
        self.staged: Future[None] = Future()
        self.local: Future[None] = Future()
        self.protected: Future[None] = Future()
        self.durable: Future[str] = Future()

    def __repr__(self) -> str:
        """Where the save is, and the levels that it has reached."""
        levels = [name for name in ("staged", "local", "protected", "durable") if _done(getattr(self, name))]
        return f"<save of iteration {self.iteration} in {self.path}: {', '.join(levels) or 'no level reached'}>"

    def complete(self) -> bool:
        """Whether the shards of all ranks are durable: from then on this checkpoint is the one that is loaded."""
        return self._save.complete

    def _failed(self, error: Exception) -> ResilError:
        """Give an error to all levels that are not reached; it names the rank."""
        about = f"rank {self._rank}, save of iteration {self.iteration}"
        if isinstance(error, ResilError):
            error.message = f"{about}: {error.message}"
            told = error
        else:
            told = ResilError(f"{about}: {error!r}", path=self.path)
            told.__cause__ = error
        for future in (self.staged, self.local, self.protected, self.durable):
            if not future.done():
                future.set_exception(told)
        log.error("slurm-resil: %s", told)
        return told


def _done(level: Future[Any]) -> bool:
    return level.done() and level.exception() is None


def async_save(
    state: Mapping[str, object],
    path: str | os.PathLike[str],
    *,
    iteration: int | None = None,
    keep: int = 2,
    backpressure: Backpressure = "skip",
) -> Handle:
    """Save a state beside training.

    When it returns, the state may change. Every rank calls it, in the same order and with the same path. What is not
    durable at the end of the process is waited for, or reported as lost.

    Args:
        state: What is saved, as for :class:`slurm_resil.Checkpointer`; :func:`load` takes the same.
        path: Directory on storage that all ranks see, made if it is not there. Nothing in it is overwritten.
        iteration: Number of the checkpoint; default: one more than the largest in the directory.
        keep: Complete checkpoints that stay in the directory, at least 1.
        backpressure: What happens when two saves are not durable yet: ``skip`` this one (its handle says so), ``wait``
            for a slot, or ``fail``: raise.

    Returns:
        The handle. Everything that goes wrong is raised by its futures, and logged.

    Raises:
        UsageError: An argument makes no sense.
        ConfigError: There is no burst buffer.
        ServiceError: The ranks cannot agree on a number.
        TryAgainError: No slot is free, with ``fail``.
    """
    if backpressure not in get_args(Backpressure):
        raise UsageError(f"backpressure={backpressure!r} is none of {', '.join(get_args(Backpressure))}")
    if keep < 1:
        raise UsageError(f"keep={keep}: at least the newest checkpoint stays", mend="as in keep=2")
    if iteration is not None:
        try:
            iteration = operator.index(iteration)
        except TypeError as error:
            raise UsageError(f"iteration={iteration!r} is no whole number") from error
        if not 0 <= iteration < 10**19:
            raise UsageError(f"iteration={iteration} is no number of iterations")
    with _lock:
        saver = _current()
    return saver.save(state, os.path.abspath(path), iteration, keep, backpressure)


class _Saver:
    """Slots and background of this process."""

    def __init__(self) -> None:
        settings = Settings.from_env(os.environ, config.load(os.environ))
        self._stack = contextlib.ExitStack()
        self._dir = _take_directory(settings.bb_root.value, settings.bb_root.source, self._stack)
        self._memo = Memo()
        self._arena: Arena | None = None
        self._rank = -1
        self._free = list(range(SLOTS))
        self._changed = threading.Condition()
        self._background = Background("slurm-resil-save")
        self._calls: dict[str, int] = {}
        self._last: dict[str, Save] = {}
        self._open: dict[Handle, None] = {}
        atexit.register(self.close)

    def save(
        self, state: Mapping[str, object], root: str, iteration: int | None, keep: int, backpressure: Backpressure
    ) -> Handle:
        """See :func:`async_save`."""
        ranks = Ranks()
        save = self._number(ranks, root, iteration)
        handle = Handle(save, ranks.rank)
        index = self._lease(WAIT_S if backpressure == "wait" else 0.0)
        if index is None:
            error = handle._failed(
                TryAgainError(f"{SLOTS} saves are not durable yet", mend="save less often, or backpressure='wait'")
            )
            if backpressure == "fail":
                raise error
            return handle
        try:
            self._take_rank(ranks.rank)
            assert self._arena is not None
            draft = self._arena.write(
                index,
                flatten(state, self._memo),
                iteration=save.iteration,
                run=save.run,
                node=os.uname().nodename,
            )
        except Exception as error:  # noqa: BLE001 -- the state is the user's: whatever its parts raise, training goes on
            self._release(index)
            handle._failed(error)
            return handle
        except BaseException:
            self._release(index)
            raise
        handle.staged.set_result(None)
        self._open[handle] = None
        self._background.put(lambda: self._finish(handle, index, draft, save, keep))
        return handle

    def _finish(self, handle: Handle, index: int, draft: ShardManifest, save: Save, keep: int) -> None:
        try:
            faults.point("save.seal")
            sealed = seal.seal(self._dir, draft)
            handle.local.set_result(None)
            saved.copy_slot(self._dir, sealed, save)
            handle.protected.set_result(None)
            handle.durable.set_result(save.path)
        except Exception as error:  # noqa: BLE001 -- top of the background: the handle has it
            handle._failed(error)
        finally:
            self._open.pop(handle, None)
            self._release(index)
        if draft.rank == 0:
            try:
                saved.prune(save.root, "save", keep)
            except OSError as error:
                log.warning("slurm-resil: old checkpoints in %s could not be removed: %s", save.root, error)

    def close(self) -> None:
        """Finish what was begun, or say that it is lost."""
        if not self._background.settle(EXIT_WAIT_S):
            for handle in list(self._open):
                log.error(
                    "slurm-resil: the save of iteration %d to %s is lost: it was not durable %g s after the end",
                    handle.iteration,
                    handle.path,
                    EXIT_WAIT_S,
                )
            return
        self._background.close()
        if self._arena is not None:
            self._arena.close()
        self._stack.close()

    def _number(self, ranks: Ranks, root: str, iteration: int | None) -> Save:
        number = self._calls[root] = self._calls.get(root, 0) + 1
        wish = saved.new(root, "save", ranks.world_size, iteration=iteration, after=self._last.get(root))
        key = f"save/{digest(root.encode('utf-8', 'surrogateescape'))}"
        text = ranks.claim(f"{key}/{number}", f"{wish.iteration} {wish.token}")
        ranks.forget(f"{key}/{number - _KEYS}")
        agreed, token = text.split()
        if iteration is not None and int(agreed) != iteration:
            raise UsageError(
                f"iteration={iteration} on rank {ranks.rank}, {agreed} on another one",
                mend="call async_save on all ranks in the same order",
            )
        made = Save(root=root, kind="save", iteration=int(agreed), token=token, world_size=ranks.world_size)
        self._last[root] = made
        return made

    def _take_rank(self, rank: int) -> None:
        """Have an arena of this rank; another one than before when the process group is another."""
        if self._arena is None or rank != self._rank:
            if self._arena is not None:
                self._background.settle(WAIT_S)
                self._arena.close()
            self._arena, self._rank = Arena(self._dir, rank, slots=SLOTS), rank

    def _lease(self, wait_s: float) -> int | None:
        deadline = time.monotonic() + wait_s
        with self._changed:
            while not self._free:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            return self._free.pop(0)

    def _release(self, index: int) -> None:
        with self._changed:
            self._free.append(index)
            self._changed.notify_all()


_lock = threading.Lock()
_saver: _Saver | None = None


def _current() -> _Saver:
    global _saver
    if _saver is None:
        _saver = _Saver()
    return _saver


def _forked() -> None:
    """A child has none of the threads, and must leave the parent's slots alone."""
    global _saver
    if _saver is not None:
        atexit.unregister(_saver.close)
        _saver = None


os.register_at_fork(after_in_child=_forked)


def _take_directory(bb_root: str, source: str, stack: contextlib.ExitStack) -> str:
    """Make this process's directory in the burst buffer, and remove those of processes that have ended.

    Args:
        bb_root: Root of the burst buffer.
        source: Who says so.
        stack: Removes the directory when it is closed.

    Raises:
        ConfigError: The root does not exist, or is another user's.
    """
    if source == "default":
        os.makedirs(bb_root, mode=0o700, exist_ok=True)
        if os.stat(bb_root, follow_symlinks=False).st_uid != os.geteuid():
            raise ConfigError(f"{bb_root} belongs to another user", mend="set SLURM_RESIL_BB_ROOT", path=bb_root)
    elif not os.path.isdir(bb_root):
        raise missing_path(bb_root, "the burst buffer", "create it on every node, or set SLURM_RESIL_BB_ROOT")
    job = os.environ.get("SLURM_JOB_ID", "")
    parent = os.path.join(paths.job_dir(bb_root, int(job)) if job.isdecimal() else bb_root, "saves")
    os.makedirs(parent, mode=0o700, exist_ok=True)
    name = ids.process_name(os.getpid())
    fd = stack.enter_context(fsio.open_dir(parent))
    for other in os.listdir(fd):
        if other.endswith(".lock") and other != f"{name}.lock":
            with _locked(fd, other) as mine:
                if mine:
                    fsio.rmtree_at(fd, other.removesuffix(".lock"))
                    os.unlink(other, dir_fd=fd)
    if not stack.enter_context(_locked(fd, f"{name}.lock")):
        raise ServiceError(f"{parent}/{name}.lock is locked by another process")
    path = os.path.join(parent, name)
    fsio.rmtree_at(fd, name)
    os.mkdir(path, 0o700)

    def remove() -> None:
        with contextlib.suppress(OSError):
            fsio.rmtree_at(fd, name)
            os.unlink(f"{name}.lock", dir_fd=fd)

    stack.callback(remove)
    return path


@contextlib.contextmanager
def _locked(parent: int, name: str) -> Iterator[bool]:
    """Lock a file, which is made if it is not there; yields False if another process has it."""
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if os.fstat(fd).st_nlink:  # else whoever had it has removed it between open and lock
                yield True
                return
        finally:
            os.close(fd)
