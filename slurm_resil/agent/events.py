"""What the leader tells its host through ``Leader.events``."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_resil.core.model import Notice


@dataclass(frozen=True, kw_only=True)
class LeaderEvent:
    """Something that happened."""


@dataclass(frozen=True, kw_only=True)
class Restored(LeaderEvent):
    """All ranks of a cycle have loaded the same iteration (0: a fresh start) and train now.

    ``protected`` is the newest iteration up to that one with redundancy on all nodes.
    """

    cycle: int
    iteration: int
    protected: int = 0


@dataclass(frozen=True, kw_only=True)
class RebuildWanted(LeaderEvent):
    """Nodes lack shards of an iteration for which there is redundancy: answered with ``Leader.rebuilt``.

    Attributes:
        iteration: Iteration.
        nodes: Nodes that lack shards.
    """

    iteration: int
    nodes: list[str]


@dataclass(frozen=True, kw_only=True)
class RestoreFailed(LeaderEvent):
    """The ranks of a cycle cannot start: there are checkpoints, and none can be used. Every rank raises.

    Attributes:
        why: Why, in the words of the rank if one has failed.
        rank: It; None if it was none of them.
        final: Whether it would be the same after a new start.
    """

    cycle: int
    why: str
    rank: int | None = None
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class SetAside(LeaderEvent):
    """A shard cannot be restored.

    Attributes:
        iteration: Of which iteration.
        rank: Whose.
        words: What is wrong, and where it was moved.
        instead: What is restored in its place.
    """

    iteration: int
    rank: int
    words: str
    instead: str


@dataclass(frozen=True, kw_only=True)
class SealedAll(LeaderEvent):
    """Every rank has sealed its shard of an iteration: level LOCAL."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class SaveFailed(LeaderEvent):
    """An iteration will never be complete; the newest one that is stands.

    Attributes:
        told_by: Rank that tells people why itself, None if no rank does.
    """

    iteration: int
    why: str
    told_by: int | None = None


@dataclass(frozen=True, kw_only=True)
class NoticeSeen(LeaderEvent):
    """Somebody gave a reason to checkpoint now; the leader acts on it."""

    notice: Notice


@dataclass(frozen=True, kw_only=True)
class StopReached(LeaderEvent):
    """The ranks end now.

    Attributes:
        iteration: Newest iteration that all ranks have sealed.
        saved: Whether that is the checkpoint of the stop itself; if not, that one failed and an older one stands.
    """

    iteration: int
    saved: bool = True


@dataclass(frozen=True, kw_only=True)
class NodeJoined(LeaderEvent):
    """An agent is there, for the first time or again."""

    node: str


@dataclass(frozen=True, kw_only=True)
class NodeLost(LeaderEvent):
    """Nothing is heard from the agent of a node: its connection broke and did not come back, or it is silent."""

    node: str
    why: str
