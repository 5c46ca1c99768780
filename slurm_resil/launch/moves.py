"""What the launcher's policy hears (events) and what it asks for (actions). Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slurm_resil.core.model import Level, NoticeKind
from slurm_resil.launch.verdict import Verdict

MoverKind = Literal["drain", "encode", "rebuild", "fetch"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened."""


@dataclass(frozen=True, kw_only=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """The ranks of a cycle have loaded an iteration; 0: a fresh start.

    ``protected`` and ``durable`` are the newest such ones up to there.
    """

    iteration: int
    cycle: int
    protected: int = 0
    durable: int = 0


@dataclass(frozen=True, kw_only=True)
class RebuildWanted(Event):
    """Before the ranks restore: nodes lack shards of an iteration for which there is redundancy."""

    iteration: int
    nodes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """An iteration will never be complete; ``why`` and ``words`` as in RestoreFailed."""

    iteration: int
    why: str
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class RestoreFailed(Event):
    """The ranks of a cycle cannot start: there are checkpoints, and none can be used.

    Attributes:
        why: Why, in full.
        words: For people who have heard the rank itself.
        final: Whether it would be the same after a new start.
    """

    why: str
    words: str = ""
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class SetAside(Event):
    """A shard of a rank is damaged, and something else is restored."""

    iteration: int
    rank: int
    words: str
    instead: str


@dataclass(frozen=True, kw_only=True)
class SealedAll(Event):
    """Every rank has sealed its shard of an iteration."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class Noticed(Event):
    """A reason to checkpoint now; ``deadline`` is on the policy's clock, seconds."""

    kind: NoticeKind
    stop: bool
    deadline: float | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class StopReached(Event):
    """The ranks end now. ``iteration`` is the newest one that all have sealed; not ``saved``: an older one."""

    iteration: int
    saved: bool = True


@dataclass(frozen=True, kw_only=True)
class NodeJoined(Event):
    """The agent of a node is there, or there again."""

    node: str


@dataclass(frozen=True, kw_only=True)
class NodeLost(Event):
    """The leader does not hear from the agent of a node."""

    node: str
    why: str


@dataclass(frozen=True, kw_only=True)
class AgentsRefused(Event):
    """Agents ended at once, for a reason that starting them again does not change: a bad configuration."""

    code: int
    words: str


@dataclass(frozen=True, kw_only=True)
class Probed(Event):
    """Answer to a Probe: which slurmd answer."""

    alive: Mapping[str, bool]


@dataclass(frozen=True, kw_only=True)
class RanksEnded(Event):
    """The step of the ranks ended; ``at`` is the iteration that they had reached, None if unknown."""

    verdict: Verdict
    at: int | None = None


@dataclass(frozen=True, kw_only=True)
class MoverEnded(Event):
    """A mover ended.

    Attributes:
        kind: What it did.
        iteration: Of what.
        ok: Whether that is done.
        duration_s: How long it took.
        words: Why it is not; of a fetch also what it has done.
        final: Whether it would end the same way again.
        cancelled: Whether a person wanted it to end.
        no_room: Whether there is no room for what it makes.
        stopped: Whether it ended because somebody asked it to, as Slurm does at the start of a grace period.
    """

    iteration: int
    ok: bool
    duration_s: float
    kind: MoverKind = "drain"
    words: str = ""
    final: bool = False
    cancelled: bool = False
    no_room: bool = False
    stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class DrainBegan(Event):
    """The drain of an iteration is past its start: it hears orders from now on."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class OrderTaken(Event):
    """The drain of an iteration goes on without a cap; ``finish``: through the SIGTERM of a grace period, too."""

    iteration: int
    finish: bool


@dataclass(frozen=True, kw_only=True)
class Pruned(Event):
    """Old checkpoints were deleted.

    Attributes:
        deleted: Their iterations.
        nbytes: Their size, bytes.
        problem: Why nothing, or not all of it, was deleted; empty if there is none.
    """

    deleted: tuple[int, ...] = ()
    nbytes: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Asked(Event):
    """The launcher itself got a signal."""

    signum: int


@dataclass(frozen=True, kw_only=True)
class Continued(Event):
    """Answer to a Continue or a Hold.

    Attributes:
        accepted: Somebody has taken the job over: Slurm will kill this attempt.
        already: Slurm counts this attempt as over: there is nothing to wait for.
        final: Asking again is of no use.
        words: What was said.
    """

    accepted: bool
    already: bool = False
    final: bool = False
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Action:
    """Something to do."""


@dataclass(frozen=True, kw_only=True)
class StartCycle(Action):
    """Start the ranks (and agents that are missing) as a cycle, after a delay."""

    cycle: int
    delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class KillRanks(Action):
    """Kill the step of the ranks, without waiting for it."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Drain(Action):
    """Start the drain of a checkpoint; ``capped``: within the configured bandwidth."""

    iteration: int
    capped: bool


@dataclass(frozen=True, kw_only=True)
class HurryDrain(Action):
    """Order the running drain to go on without a cap; ``finish``: through the SIGTERM of a grace period, too."""

    iteration: int
    finish: bool


@dataclass(frozen=True, kw_only=True)
class CancelDrain(Action):
    """Kill the running drain; nothing is published, and the next one goes on with what it wrote."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Encode(Action):
    """Start the encode of a checkpoint; ``finish``: it goes on through the SIGTERM of a grace period."""

    iteration: int
    scheme: str
    finish: bool = False


@dataclass(frozen=True, kw_only=True)
class CancelEncode(Action):
    """Kill the running encode; the checkpoint is then not protected."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Rebuild(Action):
    """Start the rebuild of a checkpoint's lost shards."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class CancelRebuild(Action):
    """Kill the running rebuild."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Fetch(Action):
    """Start to stage a durable checkpoint on the nodes."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class CancelFetch(Action):
    """Kill the running fetch."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Prune(Action):
    """Delete what the retention does not keep of what is not newer than an iteration."""

    newest: int


@dataclass(frozen=True, kw_only=True)
class TellDurable(Action):
    """Tell the leader, and through it agents and ranks, that an iteration is durable, and what its drain took."""

    iteration: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TellProtected(Action):
    """Tell the leader, and through it agents and ranks, that an iteration is protected, and what its encode took."""

    iteration: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TellUnprotected(Action):
    """Tell the leader, and through it the agents, that an iteration will not be protected."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class TellRebuilt(Action):
    """Tell the leader how a rebuild has ended."""

    iteration: int
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Probe(Action):
    """Ask the slurmd of every node whether it is there, after a delay."""

    why: str
    delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RestartAgent(Action):
    """Start the agent of a node again."""

    node: str


@dataclass(frozen=True, kw_only=True)
class Notify(Action):
    """Give the leader a notice of our own."""

    kind: NoticeKind
    deadline_in_s: float | None
    source: str


@dataclass(frozen=True, kw_only=True)
class Continue(Action):
    """Have the job started again: write the intent, mark the nodes, then ask engine or Slurm.

    Attributes:
        reason: ``walltime``, ``preemption``, ``node_loss``...
        bad_nodes: Nodes that the job must not get again.
        iteration: Newest checkpoint that the next attempt can restore.
        level: How safe that checkpoint is.
        alone: Do not ask the engine: it took the job over and nothing came of it.
    """

    reason: str
    bad_nodes: tuple[str, ...] = ()
    iteration: int = 0
    level: Level = Level.LOCAL
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Hold(Action):
    """Requeue the job held, with the reason in its comment."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class AskWhetherOver(Action):
    """Ask Slurm whether this attempt is over already; the answer, if it is, comes as a Continued."""


@dataclass(frozen=True, kw_only=True)
class Goodbye(Action):
    """Tell the agents to end, so that nobody waits for Slurm to kill them."""


@dataclass(frozen=True, kw_only=True)
class Finish(Action):
    """End the launcher: agents are told goodbye, then exit with the code."""

    code: int
    words: str
    done: bool = False  # the training is complete: nothing continues


@dataclass(frozen=True, kw_only=True)
class Report(Action):
    """A line for people and the event log."""

    event: str
    fields: Mapping[str, object] = field(default_factory=dict)
