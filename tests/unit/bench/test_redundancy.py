"""The benchmark of an encode, with real movers."""

from __future__ import annotations

import pytest

from slurm_resil.bench.redundancy import measure

pytestmark = pytest.mark.mpi


def test_ratios_and_memory(tmp_path):
    result = measure(size_bytes=24 << 20, nodes=4, repeats=1, directory=str(tmp_path))
    assert set(result.ratios) == {"redundancy.xor_limit", "redundancy.rs_codec"}
    assert all(value > 0 for value in result.ratios.values())
    assert 0 < result.figures["mover_bytes"] <= 128 << 20
