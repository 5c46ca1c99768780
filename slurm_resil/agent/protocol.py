"""What ranks, agents and the leader say to each other: frozen messages and their JSON form.

Rank and agent talk over a Unix socket, agents and leader over :mod:`slurm_resil.comm.channel`. A message on the wire is
an object with its type's name in ``t`` and the fields.

Life of a cycle::

    agent → leader    Hello   (who it is, what it knows; again after every reconnection)
    leader → agent    Cycle   (which cycle this is)
    agent → leader    Survey  (sealed shards here, once what is being sealed is done)
    leader → agents   Cycle   (again, if its host rebuilds shards; answered with Survey)
    leader → agents   Plan    (what every rank restores from; again with a higher number when an artefact is bad)
    agent → leader    Loaded  (one per rank)
    leader → agents   Go      (all have loaded: train)
    agent → leader    Beat    (once a second), Noticed (signal of a grace period), Sealed / Failed (per rank and save)
    leader → agents   Propose → Vote → Decide   (agreement on an iteration, see agent.agreement)
    leader → agents   SealedAll / Abandon / Protected / Unprotected / Durable / Deadline
    leader → agents   Goodbye

What an agent has said and the leader may not have heard is said again after a reconnection; hearing it twice is fine.

**Pins.** A mover that reads the shards of an iteration holds ``core.pins.hold(job_dir, iteration)``: a shared lock on
``<job dir>/pins/<iteration>``. Take it first, then read the manifests: while it is held, the agent neither removes a
manifest of that iteration nor gives its slots away. The lock ends with the process, however it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slurm_resil.agent.wire import Message as Message
from slurm_resil.agent.wire import from_wire as from_wire
from slurm_resil.agent.wire import to_wire as to_wire

Source = Literal["fresh", "local", "shards", "drained"]  # shards: those of all ranks, as there were other ones
Outcome = Literal["ok", "bad", "error", "unfit"]
Reached = Literal["local", "protected", "durable"]


AT_IT = "slots are being laid out already"
OTHER_WORLD = " ranks, these are "  # in words about shards of this run that are good, but for another number of ranks
UNREADABLE = "cannot be read: "  # begins the reason of a rank that could not look: nothing is known to be bad


# agent → leader


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """An agent introduces itself, again after every reconnection.

    Attributes:
        node: Name of the node.
        node_rank: Its place.
        job_id: Job, so that an agent of another one is refused.
        attempt: Attempt.
        pid: Process of the agent; another pid means that it is a new agent.
        cycle: Cycle that its control page is for, -1 for none.
        plan: Newest plan it knows, 0 for none.
        going: Whether it has heard Go for that plan.
        epoch: Newest epoch it knows.
        voted: Epoch for which it said yes without having heard the decision, or 0.
        sealed_all: Newest iteration of which it knows that all ranks have sealed it.
    """

    node: str
    node_rank: int
    job_id: int
    attempt: int
    pid: int
    cycle: int = -1
    plan: int = 0
    going: bool = False
    epoch: int = 0
    voted: int = 0
    sealed_all: int = 0


@dataclass(frozen=True, kw_only=True)
class Survey(Message):
    """Sealed shards of the node, as (iteration, rank, attempt that wrote it), for the ranks that are placed there.

    ``passed_over`` are those that cannot be restored, as (iteration, rank, why). ``whole`` are iterations of which this
    node has the shards of all ranks, and these were more or fewer than now. ``encoded`` are those of which it has its
    part of the redundancy.
    """

    cycle: int
    shards: list[tuple[int, int, int]]
    passed_over: list[tuple[int, int, str]] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Beat(Message):
    """Once a second: the agent is alive.

    Attributes:
        newest: Newest iteration that a rank here has published, 0 before the first.
        oldest: Oldest of the ranks' newest iterations.
        rate: Iterations per second, measured over the last beats; 0 if unknown.
    """

    newest: int
    oldest: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class Vote(Message):
    """Answer to a Propose: yes, all ranks here are below it, or no; ``newest`` as in Beat."""

    epoch: int
    yes: bool
    newest: int


@dataclass(frozen=True, kw_only=True)
class Sealed(Message):
    """A rank's shard is sealed.

    Attributes:
        iteration: Iteration that it holds.
        rank: Global rank.
        costs_s: Measured times, seconds: ``copy``, ``seal``.
        cycle: Cycle of the rank.
    """

    iteration: int
    rank: int
    cycle: int
    costs_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Failed(Message):
    """A rank's save did not work, or was skipped for want of a slot: this iteration can never be complete.

    Attributes:
        told: Whether the rank itself tells people why.
    """

    iteration: int
    rank: int
    cycle: int
    reason: str
    told: bool = False


@dataclass(frozen=True, kw_only=True)
class Loaded(Message):
    """Outcome of a rank's restore.

    Attributes:
        plan: Number of the plan.
        rank: Global rank.
        outcome: ``ok``; ``bad`` (the artefact is not what it claims: never try it again); ``error`` (another artefact
            would not help: an unreadable file system, no memory); ``unfit`` (and a new start neither: another model).
        reason: What was wrong.
    """

    plan: int
    rank: int
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Noticed(Message):
    """A reason to checkpoint now, see core.model.Notice; the leader answers a client with Answer."""

    kind: str
    stop: bool
    deadline_s: float | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Bye(Message):
    """The agent ends on purpose: its ranks are done."""


# client → leader, for a person's `job checkpoint`


@dataclass(frozen=True, kw_only=True)
class Ask(Message):
    """Checkpoint now; answered when it has the level or the time is over.

    Attributes:
        level: ``local``, ``protected`` (or durable, whichever comes first) or ``durable``.
        timeout_s: Seconds to wait.
        stop: Whether training must end after it.
    """

    level: Reached
    timeout_s: float
    stop: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer(Message):
    """Answer to an Ask."""

    ok: bool
    iteration: int
    words: str


# leader → agent


@dataclass(frozen=True, kw_only=True)
class Cycle(Message):
    """Answer to Hello, and again at the start of each cycle: which cycle it is; answered with Survey.

    Once more before the plan when shards are to be rebuilt, and when they have been: ``lost`` is then as in Plan, and
    the survey is of what is left.
    """

    cycle: int
    lost: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Refused(Message):
    """The leader does not want this agent; it must not come back."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan(Message):
    """What every rank of a cycle restores from.

    Attributes:
        number: Rises with every plan, over cycles too.
        cycle: Cycle.
        iteration: Iteration to restore, 0 for a fresh start.
        sources: One per rank, by rank.
        complete: Newest iteration of which every rank has its sealed shard here and now: never to be overwritten.
        protected: Newest iteration up to ``iteration`` of which every rank has its shard and every node its part of the
            redundancy.
        durable: Newest durable iteration up to ``iteration``.
        lost: Artefacts that were found bad, as (iteration, rank, reason); rank -1 means the drained file, -2 the
            shards of all ranks of another number.
        error: Not empty: nothing can be restored and nothing may be started afresh either.
        final: Whether the error would be the same after a new start.
    """

    number: int
    cycle: int
    iteration: int
    sources: list[Source]
    complete: int
    protected: int = 0
    durable: int = 0
    lost: list[tuple[int, int, str]] = field(default_factory=list)
    error: str = ""
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class Go(Message):
    """All ranks have loaded the plan."""

    plan: int


@dataclass(frozen=True, kw_only=True)
class Propose(Message):
    """Would all ranks of the node save at this iteration?"""

    epoch: int
    iteration: int
    stop: bool
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Decide(Message):
    """The decision on a proposal. Once committed it carries the proposal again, for an agent that has forgotten it."""

    epoch: int
    commit: bool
    iteration: int
    stop: bool
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class SealedAll(Message):
    """All ranks have sealed an iteration."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class Abandon(Message):
    """An iteration will never be complete: its slots are free, nobody waits for it."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class Protected(Message):
    """An iteration survives the loss of nodes: every node has its part of the redundancy."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class Unprotected(Message):
    """An iteration will not be protected: nothing of it is kept for that."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class Durable(Message):
    """An iteration is durable on the parallel file system."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class Deadline(Message):
    """A committed stop has a (new) deadline, Unix seconds."""

    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class Goodbye(Message):
    """The run is over here: end when the ranks are gone."""


# rank → agent


@dataclass(frozen=True, kw_only=True)
class RankHello(Message):
    """A rank introduces itself; answered with Page, and later with Restore.

    Attributes:
        again: Whether it comes back after its connection broke; else it has restored nothing yet.
    """

    rank: int
    local_rank: int
    world_size: int
    run_id: str
    attempt: int
    cycle: int
    pid: int
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class RankLoaded(Message):
    """Outcome of the restore, as in Loaded; answered with Start or with another Restore."""

    plan: int
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Lease(Message):
    """A slot, please; answered with Slot once one is free, or with NoSlot."""

    iteration: int
    wait_s: float


@dataclass(frozen=True, kw_only=True)
class Seal(Message):
    """The slot is written; ``draft`` is the ShardManifest without hashes, as JSON text, and ``metrics`` go into it."""

    iteration: int
    draft: str
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GiveUp(Message):
    """The save failed in the rank; the slot is free again (if there was one)."""

    iteration: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Prepare(Message):
    """Lay out the slots that are free, as this rank has published; answered with Prepared when it is done.

    Attributes:
        layout: Name of the layout; what is published may be another by now.
    """

    layout: str


@dataclass(frozen=True, kw_only=True)
class Leave(Message):
    """The rank ends on purpose."""


# agent → rank


@dataclass(frozen=True, kw_only=True)
class Page(Message):
    """The agent's answer to a rank.

    Attributes:
        path: Control page.
        slots: Number of slots of each rank.
    """

    path: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class Restore(Message):
    """What this rank restores from, see Plan."""

    plan: int
    iteration: int
    source: Source
    error: str = ""
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class Start(Message):
    """All ranks have restored the same iteration."""

    plan: int


@dataclass(frozen=True, kw_only=True)
class Slot(Message):
    """A slot was leased for an iteration."""

    iteration: int
    index: int


@dataclass(frozen=True, kw_only=True)
class NoSlot(Message):
    """No slot is free; ``reason`` says what holds them."""

    iteration: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Prepared(Message):
    """Slots were laid out ahead.

    Attributes:
        layout: As in Prepare.
        indices: Slots that are free and have it.
        reason: Why it is not all of them, empty if it is.
    """

    layout: str
    indices: list[int]
    reason: str


@dataclass(frozen=True, kw_only=True)
class ShardSealed(Message):
    """This rank's shard is sealed."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class ShardFailed(Message):
    """This rank's shard could not be sealed."""

    iteration: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Refuse(Message):
    """The agent does not want this rank."""

    reason: str
