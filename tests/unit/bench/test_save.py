"""The benchmark of a save runs, small, and gives every key that is promised; times are not judged here."""

from __future__ import annotations

import time

import pytest

from slurm_resil.bench import save
from slurm_resil.bench.held import Ticker, own_bytes

pytestmark = pytest.mark.torch

EVERY = {f"save.{name}{many}" for name in ("eager_copy", "seal_hash", "first_later") for many in ("", "_many")}
EVERY |= {"save.lazy_copy", "save.lazy_slowdown"}


def test_every_ratio_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "MANY", 300)
    result = save.measure(size_bytes=1 << 20, repeats=1, directory=str(tmp_path), peers=False)
    assert set(result.ratios) == EVERY
    assert all(ratio > 0 for ratio in result.ratios.values())
    assert {"prepare_s", "gil_ms_per_100", "extra_bytes", "lazy_blocked_s"} <= set(result.figures)
    assert list(tmp_path.iterdir()) == []


def test_who_holds_the_interpreter_is_seen():
    def hold() -> None:
        sum(range(3_000_000))  # one call, which gives nobody else a turn

    with Ticker() as ticker:
        began = time.perf_counter()
        held = ticker.during(hold)
        assert 0.3 * (time.perf_counter() - began - 0.05) < held


def test_memory_of_ones_own_is_seen():
    before = own_bytes()
    kept = bytearray(b"x") * (64 << 20)
    assert own_bytes() - before > 48 << 20
    del kept
