"""Who began it when the ranks of this host end."""

from __future__ import annotations

import pytest

from slurm_resil.launch.steps import LocalRanks
from slurm_resil.launch.verdict import Verdict


def verdict(*codes: int) -> Verdict:
    """Ranks that end one after the other with these codes, although the first end kills the others."""
    found: list[Verdict] = []
    ranks = LocalRanks([], node="here", ended=found.append)
    ranks._left = len(codes)
    for rank, code in enumerate(codes):
        ranks._end(rank, code)
    (one,) = found
    return one


@pytest.mark.parametrize(
    ("codes", "rank", "code"),
    [
        ((7, 1), 0, 7),
        ((1, 7), 1, 7),  # the peer was reaped first
        ((1, -11), 1, 139),
        ((1, -9), 0, 1),  # that was the launcher
        ((1, 1), 0, 1),
        ((-9, 7), 0, 137),
        ((0, 7), 1, 7),
    ],
)
def test_an_end_that_is_no_consequence_is_the_cause(codes: tuple[int, ...], rank: int, code: int) -> None:
    found = verdict(*codes)
    assert (found.rank, found.code) == (rank, code)
