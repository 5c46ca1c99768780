"""Types that the layers share. All frozen, all keyword-only, all plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import UTC, datetime


class Level(enum.IntEnum):
    """Durability of a checkpoint, in rising order."""

    STAGED = 1
    LOCAL = 2
    PROTECTED = 3
    DURABLE = 4


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The newest iteration of a run at each level of durability, 0 for none.

    Attributes:
        local: That all ranks have sealed.
        protected: That survives the loss of nodes: by redundancy, or because it is durable.
        durable: That is verified on the parallel file system.
    """

    local: int = 0
    protected: int = 0
    durable: int = 0


class CheckpointState(enum.StrEnum):
    """State of a checkpoint in the catalog."""

    WRITING = "WRITING"
    LOCAL = "LOCAL"
    PROTECTED = "PROTECTED"
    DRAINING = "DRAINING"
    DURABLE = "DURABLE"
    LOST = "LOST"
    DROPPED = "DROPPED"


class NoticeKind(enum.StrEnum):
    """Why a checkpoint is asked for now."""

    WALLTIME = "walltime"
    PREEMPTION = "preemption"
    MAINTENANCE = "maintenance"
    HEALTH = "health"
    PERSON = "person"
    CADENCE = "cadence"


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A reason to checkpoint now.

    Attributes:
        kind: Why.
        stop: Whether training must end after this checkpoint.
        deadline_s: Unix time by which everything must be over, or None if there is no deadline.
        source: Who said so, in a few words, for the log.
    """

    kind: NoticeKind
    stop: bool
    deadline_s: float | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """One training run, as every process of it knows it.

    Attributes:
        run_id: Name of the run over all its requeues and successors.
        job_id: Slurm's job id.
        attempt: ``SLURM_RESTART_COUNT``, from 0.
        cycle: Launch of the ranks inside the attempt, from 0.
        world_size: Number of ranks.
        nodes: Number of nodes that run ranks.
    """

    run_id: str
    job_id: int
    attempt: int
    cycle: int
    world_size: int
    nodes: int


@dataclass(frozen=True, kw_only=True)
class EndTime:
    """When Slurm will end a job: known, unlimited or unknown, never a sentinel.

    Build it with :meth:`known`, :meth:`unlimited` or :meth:`unknown`.
    """

    kind: str
    at: datetime | None = None

    @classmethod
    def known(cls, at: datetime) -> EndTime:
        """End at an aware time."""
        if at.tzinfo is None:
            raise ValueError("an end time needs a time zone")
        return cls(kind="known", at=at.astimezone(UTC))

    @classmethod
    def unlimited(cls) -> EndTime:
        """No limit."""
        return cls(kind="unlimited")

    @classmethod
    def unknown(cls) -> EndTime:
        """Not known: nothing may be concluded from it."""
        return cls(kind="unknown")


@dataclass(frozen=True, kw_only=True)
class JobTimes:
    """What Slurm says about a job's time.

    Attributes:
        start_s: Unix time of its start, 0 if it has none.
        end: Its end time, as Slurm has it now.
        preempted: Slurm is taking its nodes away; ``end`` is then the end of the grace period.
    """

    start_s: float = 0.0
    end: EndTime = field(default_factory=EndTime.unknown)
    preempted: bool = False
