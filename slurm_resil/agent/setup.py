"""What an agent has to know and to find before it can serve."""

from __future__ import annotations

import os
from dataclasses import dataclass

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import ConfigError
from slurm_resil.core.model import RunInfo
from slurm_resil.core.settings import SLOTS


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """What an agent has to know.

    Attributes:
        info: Run.
        node: Name of this node.
        node_rank: Its place.
        nodes: Names of all nodes, by node_rank; may be empty unless this agent hosts the leader.
        ranks_per_node: Ranks of each node.
        job_dir: Job's directory in the burst buffer.
        run_dir: Run's directory on the parallel file system.
        leader: ``host:port`` of the launcher's leader; None: there is no launcher, node_rank 0 hosts the leader.
        host: Address of this node for a leader of our own, used when there are more nodes.
        slots: Slots of each rank.
        interval_s: For a leader of our own: propose a checkpoint as often as this.
    """

    info: RunInfo
    node: str
    node_rank: int
    ranks_per_node: int
    job_dir: str
    run_dir: str
    nodes: tuple[str, ...] = ()
    leader: str | None = None
    host: str | None = None
    slots: int = SLOTS
    interval_s: float | None = None

    @property
    def ranks(self) -> range:
        """Global ranks of this node."""
        first = self.node_rank * self.ranks_per_node
        return range(first, first + self.ranks_per_node)


def prepare(job_dir: str, info: RunInfo, *, run_dir: str, node: str) -> None:
    """Make the job's directory in the burst buffer, unless a prolog has, and say there whose it is.

    Args:
        job_dir: The directory.
        info: Run, job and attempt.
        run_dir: Run's directory, where a late drain finds the other nodes.
        node: Name of this node.

    Raises:
        ConfigError: It cannot be made; names the path and the mend.
    """
    root = os.path.dirname(job_dir)
    try:
        for name in ("", "slots", "described", "manifests", "redundancy", "durable", "pins", "lost"):
            os.makedirs(os.path.join(job_dir, name), mode=0o700, exist_ok=True)
        fsio.write_json(
            paths.run_info(job_dir),
            {
                "run_id": info.run_id,
                "job_id": info.job_id,
                "attempt": info.attempt,
                "world_size": info.world_size,
                "run_dir": os.path.abspath(run_dir),
                "node": node,
            },
            mode=0o600,
            sync=False,
        )
    except OSError as error:
        raise ConfigError(
            f"cannot use the burst buffer {job_dir}: {error.strerror}",
            mend=f"make {root} a directory that this user can write, or set SLURM_RESIL_BB_ROOT to one",
            path=job_dir,
        ) from error
