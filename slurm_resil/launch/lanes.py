"""The movers of an attempt: at most one of each kind at a time, and what became of them as events."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from slurm_resil.core import paths
from slurm_resil.core.errors import CapacityError, SpaceError, StoppedError
from slurm_resil.core.log import event
from slurm_resil.drain import orders
from slurm_resil.launch import moves as m
from slurm_resil.launch.commands import Job, Move
from slurm_resil.launch.draining import Draining
from slurm_resil.launch.starters import Starter
from slurm_resil.launch.steps import Step, last_json
from slurm_resil.launch.verdict import FINAL

_NO_ROOM = (SpaceError.__name__, CapacityError.__name__)
_log = logging.getLogger(__name__)


class Lanes:
    """See the module.

    Args:
        job: What the command lines are made from.
        starter: Starts steps.
        cap_bytes_s: Bandwidth of drains while training.
        drain_args: More arguments of drains.
        say: Writes to the event log, and tells people; in any thread.
        put: Called with what the movers do and have come to, in a thread.
    """

    def __init__(
        self,
        job: Job,
        starter: Starter,
        *,
        cap_bytes_s: float | None,
        drain_args: Sequence[str] = (),
        say: Callable[..., object],
        put: Callable[[m.Event], None],
    ) -> None:
        self._job, self._starter, self._cap_bytes_s, self._say, self._put = job, starter, cap_bytes_s, say, put
        self._drain_args = tuple(drain_args)
        self._draining = Draining(job.run_dir, job.info.attempt, say=say, put=put)
        self._steps: dict[m.MoverKind, Step] = {}

    @property
    def steps(self) -> list[Step]:
        """All that were started last."""
        return list(self._steps.values())

    def start(self, action: m.Drain | m.Encode | m.Rebuild | m.Fetch) -> None:
        """Start a mover."""
        match action:
            case m.Drain():
                cap = self._cap_bytes_s if action.capped else None
                move = Move(
                    kind="drain",
                    iteration=action.iteration,
                    cap_bytes_s=cap,
                    finish=not action.capped,
                    arguments=self._drain_args,
                )
                orders.withdraw(self._job.run_dir)  # they were for an earlier one
                self._draining.start(action.iteration, cap)
                self._say("drain_start", iteration=action.iteration, capped=action.capped)
            case m.Encode():
                arguments = ("--scheme", action.scheme, "--sets", paths.sets(self._job.run_dir))
                finish = action.finish
                move = Move(kind="encode", iteration=action.iteration, finish=finish, arguments=arguments)
                self._say("encode_start", iteration=action.iteration, scheme=action.scheme)
            case m.Rebuild():
                move = Move(kind="rebuild", iteration=action.iteration)
            case m.Fetch():
                move = Move(kind="fetch", iteration=action.iteration)
                self._say("fetch_start", iteration=action.iteration)
        self._steps[move.kind] = self._starter.mover(
            move,
            self._draining.hear if move.kind == "drain" else lambda _: None,
            lambda code, lines, seconds: self._end(move, code, lines, seconds),
        )

    def hurry(self, action: m.HurryDrain) -> None:
        """Order the running drain to go on without a cap; storage may take its time."""
        ordered = orders.Orders(iteration=action.iteration, finish=action.finish)

        def write() -> None:
            try:
                ordered.write(self._job.run_dir)
            except OSError as error:  # it is started anew
                event(_log, "order_failed", level=logging.WARNING, why=str(error))

        event(_log, "hurry_drain", iteration=action.iteration, finish=action.finish)
        threading.Thread(target=write, name="order", daemon=True).start()

    def close(self, timeout_s: float) -> None:
        """Write down what is known of the last drain, for a bounded time."""
        self._draining.close(timeout_s)

    def kill(self, kind: m.MoverKind, why: str) -> None:
        """Kill the mover of a kind."""
        event(_log, f"cancel_{kind}", why=why)
        step = self._steps.get(kind)
        if step is not None:
            step.kill()

    def _end(self, move: Move, code: int, lines: Sequence[str], seconds: float) -> None:
        """Thread."""
        said = last_json(lines)
        words = str(said.get("words", ""))
        if code:
            words = str(said.get("error") or next(reversed([*lines]), f"exit code {code}"))
        ended = m.MoverEnded(
            kind=move.kind,
            iteration=move.iteration,
            ok=code == 0,
            duration_s=seconds,
            words=words,
            final=code in FINAL,
            no_room=bool(code) and said.get("kind") in _NO_ROOM,
            stopped=bool(code) and said.get("kind") == StoppedError.__name__,
        )
        self._put(self._draining.end(ended) if move.kind == "drain" else ended)
