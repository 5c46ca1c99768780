"""Cuts a mover's pieces into rounds of bounded size. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slurm_resil.drain.plan import Piece, Plan

MAX_RUNS = 1 << 18  # of one round: 24 bytes each here, and as much again inside MPI


def cut(plan: Plan, buffer_bytes: int, max_runs: int = MAX_RUNS) -> Iterator[list[Piece]]:
    """Yield the rounds of the plan's mover.

    Args:
        plan: Plan.
        buffer_bytes: Most bytes in a round.
        max_runs: Most contiguous ranges in a round, about.
    """
    current: list[Piece] = []
    room, runs = buffer_bytes, max_runs
    for piece in plan.pieces:
        source = plan.sources[piece.source]
        run = source.run_bytes(piece.part)
        at = piece.first
        while at < piece.last:
            end = min(piece.last, at + room, at + runs * run)
            current.append(replace(piece, first=at, last=end))
            room -= end - at
            runs -= -(-(end - at) // run)
            at = end
            if room <= 0 or runs <= 0:
                yield current
                current, room, runs = [], buffer_bytes, max_runs
    if current:
        yield current


def count_runs(plan: Plan) -> int:
    """Contiguous ranges that the plan's mover writes, about."""
    return sum(-(-piece.nbytes // plan.sources[piece.source].run_bytes(piece.part)) for piece in plan.pieces)
