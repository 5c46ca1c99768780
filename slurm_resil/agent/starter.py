"""Starts the agent of a node from a rank, where no launcher does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from slurm_resil.agent.place import Place
from slurm_resil.core.errors import ConfigError


class AgentStarter:
    """Starts the agent of this node where no launcher does; used by local rank 0.

    Args:
        place: Where this rank is.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._pid: int | None = None

    def appear(self) -> None:
        """Start it, unless the one that was started still runs.

        Raises:
            ConfigError: It ended at once; says why.
        """
        place = self._place
        if self._pid is not None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if not pid:
                return
            self._pid = None
            code = os.waitstatus_to_exitcode(status)
            if code:
                raise ConfigError(
                    f"the agent ended with code {code}: {self._last_words()}",
                    path=self._log_path(),
                    job=place.info.job_id,
                )
        root = os.path.dirname(place.job_dir)
        with contextlib.suppress(OSError):
            os.makedirs(place.job_dir, mode=0o700, exist_ok=True)  # the agent says what is wrong with it
        output = self._log_path()
        if not os.path.isdir(place.job_dir) or not os.access(place.job_dir, os.W_OK):
            raise ConfigError(
                f"cannot use the burst buffer {place.job_dir}",
                mend=f"make {root} a directory that this user can write, or set SLURM_RESIL_BB_ROOT to one",
                path=place.job_dir,
            )
        self._pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "slurm_resil", "agent", "serve"],
            self._environment(),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,  # the terminal's Ctrl-C is for the training
            setsigdef=[signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2],
        )

    def _environment(self) -> dict[str, str]:
        place, info = self._place, self._place.info
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        path = os.environ.get("PYTHONPATH")
        bb_root, prefix = os.path.dirname(place.job_dir), os.path.dirname(place.run_dir)
        drop = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return {
            **{name: value for name, value in os.environ.items() if name not in drop},
            "PYTHONPATH": os.pathsep.join([package, *([path] if path else [])]),
            "SLURM_RESIL_RUN_ID": info.run_id,
            "SLURM_RESIL_BB_ROOT": bb_root,
            "SLURM_RESIL_PREFIX": prefix,
            "SLURM_RESIL_ATTEMPT": str(info.attempt),
            "SLURM_RESIL_CYCLE": str(info.cycle),
            "SLURM_RESIL_NODE_RANK": str(place.node_rank),
            "SLURM_RESIL_RANKS_PER_NODE": str(place.ranks_per_node),
            "SLURM_RESIL_WORLD_SIZE": str(info.world_size),
            "OMP_NUM_THREADS": "1",
        }

    def _log_path(self) -> str:
        return os.path.join(self._place.job_dir, "agent.log")

    def _last_words(self) -> str:
        try:
            with open(self._log_path(), encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
        except OSError:
            return "it left no word"
        return lines[-1] if lines else "it left no word"
