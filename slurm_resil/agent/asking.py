"""A checkpoint on demand: the client that asks the leader, and the leader's list of those who wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slurm_resil.agent import protocol as p
from slurm_resil.agent.uplink import LeaderPlace
from slurm_resil.comm.channel import Channel
from slurm_resil.core.errors import ServiceError
from slurm_resil.core.model import Levels

GRACE_S = 5.0  # for the answer itself


def ask(place: LeaderPlace, *, level: p.Reached, timeout_s: float, stop: bool = False) -> p.Answer:
    """Have a run checkpoint now, and wait for a level.

    Args:
        place: Where its leader is; the caller must be the run's user.
        level: ``local``, ``protected`` or ``durable``.
        timeout_s: Longest wait, seconds.
        stop: Whether training must end after it.

    Returns:
        The answer; ``ok`` is False when it was not reached in time.

    Raises:
        ServiceError: The leader does not answer.
        NotPermittedError: It does not accept this user.
    """
    channel = place.connect()
    try:
        channel.send(p.to_wire(p.Ask(level=level, timeout_s=timeout_s, stop=stop)))
        answer = p.from_wire(channel.recv(timeout_s=timeout_s + GRACE_S))
    finally:
        channel.close()
    if not isinstance(answer, p.Answer):
        raise ServiceError(f"the leader answered {answer!r}")
    return answer


@dataclass(frozen=True)
class _Asked:
    channel: Channel
    ask: p.Ask
    above: int
    until: float


class Asking:
    """Who waits for a checkpoint.

    Args:
        send: Sends the answer.
    """

    def __init__(self, send: Callable[[Channel, p.Message], None]) -> None:
        self._send = send
        self._asked: list[_Asked] = []

    def add(self, channel: Channel, ask: p.Ask, *, above: int, now: float) -> None:
        """Hear somebody ask; a checkpoint counts from iteration ``above`` on."""
        self._asked.append(_Asked(channel, ask, max(1, above), now + ask.timeout_s))

    def forget(self, channel: Channel) -> None:
        """Hear that somebody is gone."""
        self._asked = [asked for asked in self._asked if asked.channel is not channel]

    def answer(self, levels: Levels, now: float) -> None:
        """Answer those who have what they want, and those who waited long enough.

        Args:
            levels: Newest iteration at each level.
            now: Seconds, on the clock of :meth:`add`.
        """
        for asked in list(self._asked):
            reached: int = getattr(levels, asked.ask.level)
            if reached >= asked.above:
                answer = p.Answer(ok=True, iteration=reached, words=f"iteration {reached} is {asked.ask.level}")
            elif now >= asked.until:
                words = f"not {asked.ask.level} within {asked.ask.timeout_s:g} s"
                answer = p.Answer(ok=False, iteration=reached, words=words)
            else:
                continue
            self._asked.remove(asked)
            self._send(asked.channel, answer)
