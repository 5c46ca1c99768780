"""The leader: one per run, hosted by the launcher, or by the agent of node_rank 0 where there is none."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from slurm_resil.agent.events import LeaderEvent
from slurm_resil.comm.auth import Auth
from slurm_resil.core.errors import ServiceError
from slurm_resil.core.model import Notice, RunInfo


class Leader:
    """Agreement, restore decisions, heartbeats; runs in threads of its own.

    Args:
        info: Run; ``cycle`` is the first one.
        nodes: Names of the nodes, by node_rank.
        ranks_per_node: Ranks of each node; rank = node_rank * ranks_per_node + local_rank.
        run_dir: Run's directory on the parallel file system; it must exist.
        host: Address of this node that agents can reach; loopback for one node.
        interval_s: Propose a checkpoint as often as this, or None.
        auth: How agents prove who they are; default: MUNGE where it is installed, else a key file in ``run_dir``.

    Attributes:
        address: ``host:port``; also in ``leader.json`` of the run's directory.
        events: What happens, see agent.events.
    """

    def __init__(
        self,
        *,
        info: RunInfo,
        nodes: Sequence[str],
        ranks_per_node: int,
        run_dir: str,
        host: str,
        interval_s: float | None = None,
        auth: Auth | None = None,
    ) -> None:
        self.address = ""
        self.events: queue.SimpleQueue[LeaderEvent] = queue.SimpleQueue()
        raise ServiceError("the leader is on its way")

    def start_cycle(self, cycle: int) -> None:
        """Say that the ranks of a cycle are being started: agents make a fresh control page, a plan is made."""

    def notice(self, notice: Notice) -> None:
        """Give a reason to checkpoint now. Notices to stop are merged; the earliest deadline counts."""

    def durable(self, iteration: int, *, drain_s: float | None = None) -> None:
        """Say that an iteration is durable, and how long its drain took (seconds)."""

    @property
    def iteration(self) -> int:
        """Newest iteration that any rank of this cycle has published, 0 before the first."""
        return 0

    @property
    def sealed_all(self) -> int:
        """Newest iteration that all ranks have sealed, 0 for none."""
        return 0

    def goodbye(self) -> None:
        """Tell all agents to end once their ranks are gone."""

    def close(self) -> None:
        """Stop. Agents that were not told goodbye go on and look for a new leader."""
