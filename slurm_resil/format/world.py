"""Whether shards make one checkpoint: of one run, one attempt, one iteration, and one of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from slurm_resil.core.errors import DataError


class Shard(Protocol):
    """What is compared: a manifest, or the head of one."""

    @property
    def run_id(self) -> str:
        """Run."""

    @property
    def job_id(self) -> int:
        """Slurm's job id."""

    @property
    def attempt(self) -> int:
        """Attempt that saved it."""

    @property
    def iteration(self) -> int:
        """Iteration that it holds."""

    @property
    def rank(self) -> int:
        """Whose it is."""

    @property
    def world_size(self) -> int:
        """Number of ranks that saved."""

    @property
    def where(self) -> str:
        """Words for errors: rank and node."""


def fit(heads: Sequence[Shard]) -> None:
    """Check that shards make one checkpoint.

    Raises:
        DataError: They do not: says what and on which ranks.
    """
    if not heads:
        raise DataError("there is no shard of it")
    first = heads[0]
    for head in heads:
        for name in ("run_id", "job_id", "attempt", "iteration", "world_size"):
            here, there = getattr(first, name), getattr(head, name)
            if here != there:
                text = f"{name} is {here} for {first.where}, {there} for {head.where}"
                raise DataError(f"shards of different checkpoints: {text}")
    ranks = sorted(head.rank for head in heads)
    missing = sorted(set(range(first.world_size)) - set(ranks))
    about = f"iteration {first.iteration}"
    if missing:
        raise DataError(f"{about}: no shard of {words(missing)} (world size {first.world_size})")
    odd = sorted({a for a, b in pairwise(ranks) if a == b} | set(ranks[first.world_size :]))
    if odd:
        raise DataError(f"{about}: {words(odd)} there twice or beyond world size {first.world_size}")


def words(ranks: Sequence[int]) -> str:
    """Ranks for people: ``ranks 0-3,7``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
