"""Cuts a mover's pieces into rounds of bounded size. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from slurm_resil.drain.plan import Piece, Plan

MAX_RUNS = 1 << 18  # of one round: 24 bytes each here, and as much again inside MPI


def cut(
    plan: Plan, pieces: Sequence[Piece], size: Callable[[], int], max_runs: int = MAX_RUNS
) -> Iterator[list[Piece]]:
    """Yield the rounds of some of the plan's pieces.

    Args:
        plan: Plan.
        pieces: In the order of the file.
        size: Most bytes in a round; asked for each anew.
        max_runs: Most contiguous ranges in a round, about.
    """
    current: list[Piece] = []
    room, runs = size(), max_runs
    for piece in pieces:
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
                current, room, runs = [], size(), max_runs
    if current:
        yield current


def count_runs(plan: Plan, pieces: Sequence[Piece]) -> int:
    """Contiguous ranges that some of the plan's pieces are, about."""
    return sum(-(-piece.nbytes // plan.sources[piece.source].run_bytes(piece.part)) for piece in pieces)
