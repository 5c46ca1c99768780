"""What a training script uses: a Checkpointer."""

from __future__ import annotations

import functools
import logging
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, SupportsFloat, get_args

from slurm_resil.agent import protocol as p
from slurm_resil.agent.link import RankLink
from slurm_resil.agent.place import Place, from_env
from slurm_resil.agent.seat import Kind, Seat
from slurm_resil.agent.starter import AgentStarter
from slurm_resil.ckpt.options import LoadOptions
from slurm_resil.core import control, exits, fsio, paths
from slurm_resil.core.background import Background, crew
from slurm_resil.core.errors import DataError, NotRestoredError, ResilError, UsageError
from slurm_resil.core.metrics import Metrics
from slurm_resil.core.model import Levels
from slurm_resil.session.saving import Saving
from slurm_resil.session.store import Private, StateStore, slot_store

Backpressure = Literal["skip", "wait", "fail"]

AGENT_WAIT_S = 60.0  # for the agent of this node
RESTORE_WAIT_S = 1800.0  # for the other ranks
SLOT_WAIT_S = 20.0  # for a slot, when somebody asked for the checkpoint
BACKPRESSURE_WAIT_S = 600.0  # for a slot, with backpressure="wait"
STOP_WAIT_S = 900.0  # at a stop without a deadline, for all ranks to be sealed
PREPARE_WAIT_S = 600.0  # for the agent to lay out the slots
CLOSE_WAIT_S = 120.0  # at the end, for what is being sealed
DRAINED_TRIES, DRAINED_PAUSE_S = 3, 1.0
_POLL_S = 0.002
_POLL_FAR_S = 0.02  # for what takes other processes
_NEVER = 1 << 63
_open: set[tuple[str, int]] = set()  # job's directory and rank of every Checkpointer of this process
log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores one training state.

    Use it as a context manager, made by :meth:`from_env`::

        with Checkpointer.from_env(state) as checkpointer:
            for i in range(checkpointer.restore(), n):
                train(i)
                if checkpointer.step(i + 1):
                    break

    A save that fails never ends the training, unless ``strict``: it is logged as an error, ``last_error`` says why,
    and the checkpoint before it stands.

    """

    def __init__(
        self,
        place: Place,
        make_store: Callable[[Sequence[Background], int, Private, LoadOptions], StateStore],
        *,
        every: int | None = None,
        backpressure: Backpressure = "skip",
        strict: bool = False,
        lazy: bool = False,
    ) -> None:
        if backpressure not in get_args(Backpressure):
            raise UsageError(f"backpressure={backpressure!r} is none of {', '.join(get_args(Backpressure))}")
        if every is not None and every < 1:
            raise UsageError(f"every={every} is no number of iterations")
        self._place, self._make_store = place, make_store
        self._key = (place.job_dir, place.rank)
        if self._key in _open:
            raise UsageError(
                f"there is a Checkpointer of run {place.info.run_id} in this process already",
                mend="put everything into one state, or close() the other one first",
            )
        self._every, self._backpressure, self._strict = every, backpressure, strict
        self._saving: Saving | None = None
        self._seat: Seat | None = None
        self._closed = False
        self._lazy = lazy
        self._due = self._next = _NEVER  # of the cadence; and from where on step() looks further
        self._metrics = Metrics()
        hello = p.RankHello(
            rank=place.rank,
            local_rank=place.local_rank,
            world_size=place.info.world_size,
            run_id=place.info.run_id,
            attempt=place.info.attempt,
            cycle=place.info.cycle,
            pid=os.getpid(),
        )
        alone = place.leader is None
        starter = AgentStarter(place).appear if alone and place.local_rank == 0 else None
        self._link = RankLink(
            paths.agent_socket(place.job_dir), hello, timeout_s=AGENT_WAIT_S, appear=starter, alone=alone
        )
        _open.add(self._key)
        self._helpers = crew("resil checks", place.ranks_per_node)
        # what step() touches; before restore() any proposal is far away
        self._words = memoryview(bytearray(control.HEAD_WORDS * control.WORD_BYTES)).cast("Q")
        self._words[control.PROPOSAL] = _NEVER
        self._at = control.FAILED  # any word: it is the private dummy's

    @classmethod
    def from_env(
        cls,
        state: Mapping[str, object],
        *,
        every: int | None = None,
        backpressure: Backpressure = "skip",
        strict: bool = False,
        lazy: bool = False,
        env: Mapping[str, str] = os.environ,
    ) -> Checkpointer:
        """Make one from the environment of the rank; works without any, too.

        From here on an uncaught error of this package that a new start cannot mend ends the process with its own exit
        code (65 for a checkpoint of another model), not with 1: the launcher then does not start the ranks again.

        Args:
            state: What is saved: modules, optimizers, objects with ``state_dict``, tensors, arrays, plain values.
            every: Save whenever this many iterations are complete; default ``SLURM_RESIL_EVERY``.
            backpressure: What a save of the cadence does when no slot is free: ``skip``, ``wait`` or ``fail``.
            strict: Raise when a save fails, instead of reporting it and going on.
            lazy: Copy parameters and what optimizers keep for them during the next forward and backward pass; the
                optimizers' ``step()`` waits for what is left. Only for training in which nothing but ``step()`` of
                optimizers that are in the state changes these (no CUDA graph around it, no writes to ``.data``). What
                else changes them is found in most cases, and then the save fails.
            env: Environment.

        Raises:
            ConfigError: The environment makes no sense, or the burst buffer cannot be used.
            ServiceError: There is no agent.
            UsageError: An argument makes no sense, or this process has a Checkpointer of the run that is not closed.
        """
        exits.install()
        place = from_env(env)
        return cls(
            place,
            functools.partial(slot_store, place, state),
            every=every or place.every,
            backpressure=backpressure,
            strict=strict,
            lazy=lazy,
        )

    def restore(
        self,
        *,
        private: Private = "error",
        options: LoadOptions | None = None,
        timeout_s: float = RESTORE_WAIT_S,
    ) -> int:
        """Load the newest checkpoint that all ranks can load.

        Collective: over all ranks, each must call it once, before the first :meth:`step`.

        Args:
            private: What becomes of rank-private state when the number of ranks has changed: ``error``, ``fresh`` (it
                stays as it is) or ``rank_mod`` (rank r gets that of r modulo the old number).
            options: What may differ from everything, exactly: a part by pattern, what is missing or unexpected,
                conversions. What was left as it was is logged as a warning.
            timeout_s: Longest wait for the other ranks, seconds.

        Returns:
            Its iteration, 0 for a fresh start. The same on all ranks.

        Raises:
            StateError: Something in the state cannot be stored, or it does not fit the checkpoint; nothing was changed.
            DataError: Another rank could not restore, or a bad checkpoint was found while it was being loaded and there
                is no other: the state may be changed in part, and the next start will not try that one again.
            ServiceError: Agent or other ranks were not heard in time.
        """
        if self._closed or self._seat is not None:
            raise UsageError("the Checkpointer is closed" if self._closed else "restore() was called already")
        if private not in get_args(Private):
            raise UsageError(f"private={private!r} is none of {', '.join(get_args(Private))}")
        store = self._make_store(self._helpers, self._link.page.slots, private, options or LoadOptions())
        plan, iteration, touched = 0, 0, False
        while True:
            answer = self._link.restore(plan, timeout_s=timeout_s)
            if isinstance(answer, p.Start):
                break
            plan, iteration = answer.plan, answer.iteration
            if answer.error:
                kind = DataError if answer.final else NotRestoredError
                raise kind(f"nothing was restored: {answer.error}", rank=self._place.rank)
            if answer.source == "fresh" and touched:
                reason = "no checkpoint is left that verifies, and the state was changed by one that does not"
                self._link.loaded(plan, "error", reason)
                raise NotRestoredError(
                    reason, mend="start again: bad checkpoints are not tried twice", rank=self._place.rank
                )
            touched = touched or answer.source != "fresh"
            self._load(store, answer)
        self._saving = Saving(self._link, store, rank=self._place.rank, lazy=self._lazy, strict=self._strict)
        self._take_seat(iteration)
        return iteration

    def step(self, iteration: int) -> bool:
        """Say that an iteration is complete: publish it, and save if the cadence or anybody asks for it.

        All ranks must call it with the same rising numbers (iterations that are complete).

        Returns:
            True when everything is safe and training must end now; on all ranks at the same iteration.

        Raises:
            ResilError: With ``strict``: the save failed.
            UsageError: The iteration is no whole number, or a smaller one than before.
        """
        words = self._words
        try:
            if iteration < words[self._at]:
                raise UsageError(
                    f"step({iteration}) after step({words[self._at]}): iterations only rise",
                    mend="count them over the whole training, not within an epoch",
                )
            words[self._at] = iteration
        except (TypeError, ValueError) as error:
            raise UsageError(f"step({iteration!r}): a whole number of complete iterations is needed") from error
        if words[3] or iteration >= self._next:  # control.PROPOSAL; the agent fences for both, see core.control
            return self._act(iteration)
        return False

    @property
    def last_error(self) -> str:
        """Why the newest failed save failed, empty if none has."""
        return self._saving.last_error if self._saving is not None else ""

    @last_error.setter
    def last_error(self, why: str) -> None:
        if self._saving is not None:
            self._saving.last_error = why

    @property
    def skipped(self) -> int:
        """How many saves were left out because no slot was free: storage is slower than the cadence."""
        return self._saving.skipped if self._saving is not None else 0

    def poll(self) -> bool:
        """Whether a stop was asked for; for long loops without iterations (evaluation, warm-up).

        Leave such a loop when it is True and call :meth:`step`.
        """
        return self._seat is not None and self._seat.stop_asked

    def save(self, iteration: int) -> bool:
        """Save now, whatever the cadence says; all ranks must call it at the same iteration.

        Returns:
            Whether the state was handed over; see ``last_error``. Sealing goes on in the agent.

        Raises:
            ResilError: With ``strict``: the save failed.
            UsageError: The iteration is no whole number from 1 on, or a smaller one than before, or restore() was not
                called.
        """
        self._started()
        try:
            iteration = operator.index(iteration)
        except TypeError as error:
            raise UsageError(f"save({iteration!r}): a whole number of complete iterations is needed") from error
        if not 0 < iteration < _NEVER:
            raise UsageError(
                f"save({iteration}): a whole number of complete iterations is needed, from 1 on",
                mend="count complete iterations: before the first there is nothing that a restore would not start with",
            )
        if iteration < self._words[self._at]:
            raise UsageError(
                f"save({iteration}) after iteration {self._words[self._at]}: iterations only rise",
                mend="count them over the whole training, not within an epoch",
            )
        self._words[self._at] = iteration
        return self._save(iteration, wait_s=SLOT_WAIT_S)

    def prepare(self, *, timeout_s: float = PREPARE_WAIT_S) -> bool:
        """Lay out and map all slots that are free, for the state as it is now, so that the next save is only a copy.

        The agent does this by itself during the first iterations, but for the mapping. It is worth a call where the
        first save has to be fast, and once the optimizer has its state: after the first iteration.

        Returns:
            Whether it was done; if not, ``last_error`` says why, and saves lay out what they need.

        Raises:
            ResilError: With ``strict``: it could not be done.
            UsageError: restore() was not called.
        """
        self._started()
        assert self._saving is not None
        return self._saving.prepare(timeout_s)

    def metric(self, **values: SupportsFloat) -> None:
        """Say how good the state is now: ``metric(loss=0.31)``, before the :meth:`step` or :meth:`save` that saves it.

        It is kept with the next save, and with no other. Retention can keep the best (``--keep-best loss:min``), and
        ``slurm-resil ckpt ls`` shows them. One rank is enough; of several that give a metric the lowest counts. What is
        not finite is left out.

        Args:
            values: Numbers, or tensors of one element (on a device: this waits for it).

        Raises:
            UsageError: A value is no number, or a name has a space or a colon, or over 100 characters.
        """
        self._metrics.add(values)

    @property
    def levels(self) -> Levels:
        """The newest iteration of the run at each level of safety, as this node has heard; all 0 before restore()."""
        return self._seat.levels if self._seat is not None else Levels()

    def wait(self, *, timeout_s: float, level: p.Reached = "local") -> bool:
        """Wait until the newest save of this rank, or a newer one, has reached a level.

        Args:
            timeout_s: Longest wait, seconds.
            level: ``local``: all ranks have sealed it. ``protected``: it survives the loss of nodes, by redundancy or
                because it is durable, whichever comes first; without redundancy the latter. ``durable``: it is on the
                parallel file system, verified. The last two need the launcher, ``slurm-resil run``.

        Returns:
            False if not in time, or if the save was given up.
        """
        if level not in get_args(p.Reached):
            raise UsageError(f"level={level!r} is none of {', '.join(get_args(p.Reached))}")
        seat = self._started(closed=True)  # the agent goes on with it
        deadline = time.monotonic() + timeout_s
        assert self._saving is not None
        newest = self._saving.newest
        while (reached := seat.levels).local < newest or getattr(reached, level) < newest:
            failed = seat.given_up >= newest > reached.local
            if failed or time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S if level == "local" else _POLL_FAR_S)
        return True

    def close(self, *, wait_s: float = CLOSE_WAIT_S) -> None:
        """Leave, once what was saved is sealed; what is not by then is reported (the agent goes on with it).

        Args:
            wait_s: Longest wait, seconds.
        """
        try:
            if self._saving is not None:
                self._saving.close(wait_s)
        finally:
            self._closed, self._next = True, 0  # step() looks, and says so
            self._link.close()
            for helper in self._helpers:
                helper.close()
            _open.discard(self._key)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait_s=CLOSE_WAIT_S if kind is None else 0.0)

    # restore

    def _load(self, store: StateStore, answer: p.Restore) -> None:
        try:
            if answer.source in ("local", "shards"):
                load = store.load_local if answer.source == "local" else store.load_shards
                try:
                    load(answer.iteration)
                except OSError as error:
                    raise DataError(f"{p.UNREADABLE}{error}", fault="unreadable") from error
            elif answer.source == "drained":
                self._load_drained(store, answer.iteration)
        except DataError as error:
            self._log("%s checkpoint of iteration %d is bad: %s", answer.source, answer.iteration, error)
            unreadable = error.context.get("fault") == "unreadable" and not error.message.startswith(p.UNREADABLE)
            self._link.loaded(answer.plan, "bad", p.UNREADABLE * unreadable + str(error))
        except BaseException as error:
            outcome: p.Outcome = "unfit" if isinstance(error, ResilError) and error.final else "error"
            self._link.loaded(answer.plan, outcome, f"{type(error).__name__}: {error}")
            raise
        else:
            self._link.loaded(answer.plan, "ok")

    @staticmethod
    def _load_drained(store: StateStore, iteration: int) -> None:
        for left in reversed(range(DRAINED_TRIES)):
            try:
                store.load_drained(iteration)
                return
            except OSError as error:
                if not left or error.errno in fsio.UNREADABLE:
                    raise DataError(f"{p.UNREADABLE}{error}", fault="unreadable") from error
                time.sleep(DRAINED_PAUSE_S)

    def _take_seat(self, start: int) -> None:
        page = control.ControlPage.open(self._link.page.path, occupy=True)
        self._seat = seat = Seat(page, self._place.local_rank)
        self._words, self._at = seat.words, seat.iteration
        self._set_due(start)
        self._next = start + 1  # to prepare the slots

    def _started(self, *, closed: bool = False) -> Seat:
        if self._closed and not closed:
            raise UsageError("the Checkpointer is closed", mend="make another one, and restore() with it")
        if self._seat is None:
            raise UsageError("restore() must be called first, on all ranks", mend="it returns 0 for a fresh start")
        return self._seat

    # save

    def _act(self, iteration: int) -> bool:
        seat = self._started()
        iteration = operator.index(iteration)
        order = seat.look(iteration)
        cadence = iteration >= self._due
        if cadence:
            self._set_due(iteration)
        self._next = self._due
        assert self._saving is not None
        self._saving.prepare_soon()
        self._saving.report()
        if order.kind is not Kind.NOTHING:
            if not order.sure:
                self._log("no decision on the checkpoint at iteration %d came in time; saving anyway", iteration)
            wait_s = SLOT_WAIT_S
            left = seat.time_left() if order.kind is Kind.SAVE_AND_STOP else None
            if left is not None:
                wait_s = max(0.0, min(wait_s, left / 2))
        elif cadence:
            wait_s = BACKPRESSURE_WAIT_S if self._backpressure == "wait" else 0.0
        else:
            return False
        try:
            self._save(iteration, wait_s=wait_s, at_once=order.kind is Kind.SAVE_AND_STOP)
        finally:
            if order.epoch:
                seat.acted(iteration)
        self._saving.report()
        if order.kind is not Kind.SAVE_AND_STOP:
            return False
        self._wait_stop(seat, iteration)
        return True

    def _set_due(self, iteration: int) -> None:
        if self._every is not None:
            self._due = (iteration // self._every + 1) * self._every

    def _save(self, iteration: int, *, wait_s: float, at_once: bool = False) -> bool:
        assert self._saving is not None
        fail = self._backpressure == "fail"
        lazy = self._lazy and not at_once
        done = self._saving.save(iteration, metrics=self._metrics, wait_s=wait_s, lazy=lazy, fail=fail)
        if self._lazy:
            self._next = min(self._next, iteration + 1)  # to hear what became of it
        return done

    def _wait_stop(self, seat: Seat, iteration: int) -> None:
        """Nobody leaves before all are sealed, or it is certain that they will not be."""
        limit = time.monotonic() + STOP_WAIT_S
        while seat.sealed_all < iteration:
            left = seat.time_left()
            if seat.given_up >= iteration:
                self._log("the checkpoint at the stop, iteration %d, was given up; the one before stands", iteration)
                return
            if time.monotonic() >= limit or (left is not None and left <= 0):
                self._log("the checkpoint at the stop, iteration %d, was not sealed by all ranks in time", iteration)
                return
            time.sleep(_POLL_S)

    def _log(self, text: str, *values: object) -> None:
        log.error(f"slurm-resil: rank %d: {text}", self._place.rank, *values)
