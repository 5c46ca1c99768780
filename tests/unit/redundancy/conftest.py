"""Makes the shards of the drain's tests importable by name, and leaves no fault point set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resil.core import faults

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "drain")]


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    yield
    faults.load("")
