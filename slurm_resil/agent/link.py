"""A rank's connection to its agent: a small thread listens, and comes back when the agent was started anew."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from slurm_resil.agent import protocol as p
from slurm_resil.comm import unix
from slurm_resil.comm.channel import Channel, ChannelClosedError, ChannelTimeoutError
from slurm_resil.core.errors import DataError, NotPermittedError, ServiceError, TryAgainError
from slurm_resil.core.log import event

RETRY_S = 0.1
ANSWER_S = 5.0
MUTE_S = 0.05  # the same of one that was silent before
_UNSAID = 16  # saves that did not work and of which no agent has heard yet
log = logging.getLogger(__name__)


class RankLink:
    """See the module.

    Args:
        path: Agent's socket.
        hello: Who we are.
        timeout_s: For the first connection, seconds.
        appear: Called while nobody answers, to start an agent; None if somebody else does.
        alone: There is no launcher: an agent that does not want us may be on its way out, and another will come.

    Attributes:
        page: What the agent said at first: control page and number of slots.

    Raises:
        ServiceError: No agent in time.
        NotPermittedError: The agent does not want this rank.
    """

    def __init__(
        self,
        path: str,
        hello: p.RankHello,
        *,
        timeout_s: float,
        appear: Callable[[], None] | None = None,
        alone: bool = False,
    ) -> None:
        self._path, self._hello = path, hello
        self._changed = threading.Condition()
        self._channel: Channel | None = None
        self._restore: p.Restore | None = None
        self._started = 0
        self._outcome: p.RankLoaded | None = None
        self._leases: dict[int, p.Slot | p.NoSlot] = {}
        self._prepared: p.Prepared | None = None
        self._pending: dict[int, p.Seal] = {}
        self._unsaid: list[p.GiveUp] = []
        self._results: dict[int, str] = {}  # iteration: what was wrong, or nothing
        self._mute = False
        self._closing = threading.Event()
        self.page = self._first(timeout_s, appear, alone=alone)
        self._thread = threading.Thread(target=self._run, name="resil link", daemon=True)
        self._thread.start()

    # restore

    def restore(self, after: int, *, timeout_s: float) -> p.Restore | p.Start:
        """Wait for what comes after plan ``after``: a newer plan, or the start from that one.

        Raises:
            ServiceError: Neither came.
        """
        with self._changed:

            def answer() -> p.Restore | p.Start | None:
                if self._restore is not None and self._restore.plan > after:
                    return self._restore
                return p.Start(plan=after) if after and self._started >= after else None

            found = self._changed.wait_for(answer, timeout_s)
            if found is None:
                what = "a decision what to restore" if not after else "the other ranks to restore"
                raise ServiceError(
                    f"waited {timeout_s:g} s for {what}",
                    mend="look at agent.log in the job's burst buffer directory of each node",
                    rank=self._hello.rank,
                )
            return answer() or found

    def loaded(self, plan: int, outcome: p.Outcome, reason: str = "") -> None:
        """Say how the restore went."""
        self._outcome = p.RankLoaded(plan=plan, outcome=outcome, reason=reason)
        self._send(self._outcome)

    # saves

    def lease(self, iteration: int, *, wait_s: float) -> int:
        """Get a slot for an iteration, and its index.

        Raises:
            TryAgainError: None is free.
            ServiceError: The agent does not answer.
        """
        message = p.Lease(iteration=iteration, wait_s=wait_s)
        # training waits here: for an agent that has not answered the last time, next to nothing
        answer_s = MUTE_S if self._mute and wait_s < ANSWER_S else ANSWER_S
        deadline = time.monotonic() + wait_s + answer_s
        asked: Channel | None = None

        def answer() -> p.Slot | p.NoSlot | None:
            nonlocal asked
            if self._channel is not asked:  # the first time, and again if the agent was started anew
                asked = self._channel
                self._send(message)
            return self._leases.pop(iteration, None)

        with self._changed:
            self._leases.clear()
            lease = self._changed.wait_for(answer, deadline - time.monotonic())
        if lease is None:
            self._mute = True
            words = f"the agent gave no slot for iteration {iteration} in {wait_s + answer_s:g} s"
            raise ServiceError(words, path=self._path)
        if isinstance(lease, p.NoSlot):
            raise TryAgainError(lease.reason, iteration=iteration, rank=self._hello.rank)
        return lease.index

    def prepare_soon(self, layout: str) -> None:
        """Ask for slots to be laid out, see ``Prepare``."""
        with self._changed:
            self._prepared = None
        self._send(p.Prepare(layout=layout))

    def prepare(self, layout: str, *, timeout_s: float) -> tuple[int, ...]:
        """Have slots laid out; returns those that are free and laid out now.

        Raises:
            TryAgainError: Not all that are free could be.
            ServiceError: The agent does not answer.
        """
        deadline = time.monotonic() + timeout_s
        asked: Channel | None = None

        def answer() -> p.Prepared | None:
            nonlocal asked
            if self._channel is not asked:
                asked = self._channel
                self._prepared = None
                self._send(p.Prepare(layout=layout))
            found = self._prepared
            return found if found is not None and found.layout == layout else None

        while True:
            with self._changed:
                found = self._changed.wait_for(answer, deadline - time.monotonic())
            if found is None:
                raise ServiceError(f"the agent laid out no slots in {timeout_s:g} s", path=self._path)
            if found.reason != p.AT_IT:
                break
            asked = None  # what was asked for before is at work
            self._closing.wait(RETRY_S)
        if found.reason:
            raise TryAgainError(found.reason, rank=self._hello.rank)
        return tuple(found.indices)

    def seal(self, iteration: int, draft: str, metrics: dict[str, float]) -> None:
        """Hand a written slot over."""
        message = p.Seal(iteration=iteration, draft=draft, metrics=metrics)
        with self._changed:
            self._pending[iteration] = message
            self._results.pop(iteration, None)
        try:
            self._send(message)
        except ServiceError:
            with self._changed:
                self._pending.pop(iteration, None)  # or it would be sent again, and fail again
            raise

    def give_up(self, iteration: int, reason: str) -> None:
        """Say that a save did not work; to the next agent, if there is none now."""
        message = p.GiveUp(iteration=iteration, reason=reason)
        if not self._send(message):
            with self._changed:
                self._unsaid = [*self._unsaid, message][-_UNSAID:]

    def result(self, iteration: int, *, timeout_s: float = 0.0) -> str | None:
        """What became of a shard: an empty string when it is sealed, else what was wrong; None if not known yet."""
        with self._changed:
            self._changed.wait_for(lambda: iteration in self._results, timeout_s)
            return self._results.get(iteration)

    def failures(self) -> dict[int, str]:
        """Failed seals that nobody has asked for yet; each is returned once."""
        with self._changed:
            found = {iteration: why for iteration, why in self._results.items() if why}
            for iteration in found:
                del self._results[iteration]
            return found

    def settle(self, timeout_s: float) -> list[int]:
        """Wait until everything handed over is sealed or has failed, or the agent is gone; returns what is open."""
        now = time.monotonic()
        deadline, heard = now + timeout_s, now
        with self._changed:
            while self._pending and now < min(deadline, heard + ANSWER_S):
                self._changed.wait(0.2)
                now = time.monotonic()
                heard = now if self._channel is not None else heard
            return sorted(self._pending)

    def close(self) -> None:
        """Leave."""
        self._closing.set()
        self._send(p.Leave())
        if self._channel is not None:
            self._channel.close()
        self._thread.join(timeout=5)

    # the thread

    def _first(self, timeout_s: float, appear: Callable[[], None] | None, *, alone: bool) -> p.Page:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._connect(max(0.1, deadline - time.monotonic()))
            except ServiceError as error:
                if time.monotonic() >= deadline:
                    raise ServiceError(
                        f"no agent answers on this node in {timeout_s:g} s: {error}",
                        mend="look at agent.log beside its socket, or start with `slurm-resil run`",
                        path=self._path,
                    ) from error
            except NotPermittedError as error:
                if not alone or time.monotonic() >= deadline:
                    # it is of another cycle or attempt, which is over in a moment: a new start finds its own
                    raise ServiceError(error.message, mend="start again", path=self._path) from error
                self._closing.wait(RETRY_S)
                continue
            if appear is not None:
                appear()
            self._closing.wait(RETRY_S)

    def _connect(self, timeout_s: float, *, again: bool = False) -> p.Page:
        channel = unix.connect(self._path)
        try:
            channel.send(p.to_wire(dataclasses.replace(self._hello, again=again)))
            answer = p.from_wire(channel.recv(timeout_s=timeout_s))
        except BaseException:
            channel.close()
            raise
        if not isinstance(answer, p.Page):
            channel.close()
            reason = answer.reason if isinstance(answer, p.Refuse) else f"answered {answer!r}"
            raise NotPermittedError(f"the agent does not want rank {self._hello.rank}: {reason}", path=self._path)
        with self._changed:
            self._channel = channel
            self._changed.notify_all()
        return answer

    def _run(self) -> None:
        while not self._closing.is_set():
            channel = self._channel
            if channel is None:
                self._again()
                continue
            try:
                with contextlib.suppress(ChannelTimeoutError):
                    self._hear(p.from_wire(channel.recv(timeout_s=60)))
            except ChannelClosedError:
                with self._changed:
                    self._channel = None
            except DataError as error:
                event(log, "bad_message", level=logging.ERROR, why=str(error))

    def _again(self) -> None:
        try:
            self._connect(ANSWER_S, again=True)
        except (ServiceError, NotPermittedError, DataError):
            self._closing.wait(RETRY_S)
            return
        event(log, "agent_back", rank=self._hello.rank)
        if self._outcome is not None:
            self._send(self._outcome)
        with self._changed:
            pending: list[p.Seal | p.GiveUp] = [*self._pending.values(), *self._unsaid]
            self._unsaid = []
        for message in pending:
            self._send(message)

    def _hear(self, message: p.Message) -> None:
        with self._changed:
            self._mute = False
            match message:
                case p.Restore():
                    self._restore = message
                case p.Start():
                    self._started = max(self._started, message.plan)
                case p.Prepared():
                    self._prepared = message
                case p.Slot() | p.NoSlot():
                    self._leases[message.iteration] = message
                case p.ShardSealed():
                    self._pending.pop(message.iteration, None)
                    self._keep(message.iteration, "")
                case p.ShardFailed():
                    self._pending.pop(message.iteration, None)
                    self._keep(message.iteration, message.reason or "unknown")
                case _:
                    pass
            self._changed.notify_all()

    def _keep(self, iteration: int, result: str) -> None:
        self._results[iteration] = result
        for old in sorted(self._results)[:-16]:
            del self._results[old]

    def _send(self, message: p.Message) -> bool:
        """Send, unless there is no agent: the thread comes back and says it again."""
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(ChannelClosedError):
                channel.send(p.to_wire(message))
                return True
        return False
