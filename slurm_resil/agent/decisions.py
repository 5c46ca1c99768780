"""The record of commits and aborts: one file per epoch, made once. Whoever makes it first has decided.

The leader writes a commit before it tells anybody. A leader that takes over and meets an agent which has voted without
hearing a decision tries to write an abort: either that works, and the old leader can then not commit any more, or the
commit is already there.
"""

from __future__ import annotations

import contextlib
import json
import os

from slurm_resil.agent.protocol import Decide
from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError

KEEP = 64


class Decisions:
    """Decisions of a run.

    Args:
        run_dir: Run's directory; None where it cannot be written: the record is then in memory only, and a leader
            that takes over aborts what it has not heard of.
    """

    def __init__(self, run_dir: str | None) -> None:
        self._run_dir = run_dir
        self._memory: dict[int, tuple[Decide, int, int]] = {}
        self._directory = os.path.dirname(paths.decision(run_dir or "", 0))
        if run_dir is not None:
            os.makedirs(self._directory, mode=0o755, exist_ok=True)

    def record(self, decide: Decide, *, attempt: int, cycle: int) -> Decide:
        """Record a decision, unless there is one for this epoch; returns what is on record.

        Raises:
            OSError: The file system refused: nothing is decided.
        """
        if self._run_dir is None:
            return self._memory.setdefault(decide.epoch, (decide, attempt, cycle))[0]
        path = paths.decision(self._run_dir, decide.epoch)
        document = {
            "epoch": decide.epoch,
            "commit": decide.commit,
            "iteration": decide.iteration,
            "stop": decide.stop,
            "deadline_s": decide.deadline_s,
            "attempt": attempt,
            "cycle": cycle,
        }
        # written under another name and linked: nobody sees half of it, and the first link wins
        temp = f"{path}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
        with open(temp, "x", encoding="utf-8") as file:
            file.write(json.dumps(document))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temp, path)
        except FileExistsError:
            found = self.read(decide.epoch)
            if found is not None:
                return found[0]
            raise
        finally:
            os.unlink(temp)
        self._prune()
        return decide

    def read(self, epoch: int) -> tuple[Decide, int, int] | None:
        """Return the decision on record with its attempt and cycle; None if there is none or it cannot be read."""
        if self._run_dir is None:
            return self._memory.get(epoch)
        try:
            raw = fsio.read_json(paths.decision(self._run_dir, epoch))
            attempt, cycle = int(raw.pop("attempt")), int(raw.pop("cycle"))
            return Decide(**raw), attempt, cycle
        except (OSError, DataError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def newest(self, *, attempt: int, cycle: int) -> Decide | None:
        """Return the newest commit of a cycle."""
        for epoch in sorted(self._epochs(), reverse=True):
            found = self.read(epoch)
            if found is not None and found[1:] == (attempt, cycle) and found[0].commit:
                return found[0]
        return None

    def _epochs(self) -> list[int]:
        if self._run_dir is None:
            return list(self._memory)
        names = (os.path.splitext(name) for name in os.listdir(self._directory))
        return [int(stem) for stem, suffix in names if suffix == ".json" and stem.isdecimal()]

    def _prune(self) -> None:
        for epoch in sorted(self._epochs())[:-KEEP]:
            with contextlib.suppress(OSError):
                os.unlink(paths.decision(self._run_dir or "", epoch))
