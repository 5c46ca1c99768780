from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from slurm_resil.core.costs import KEEP, Costs


def test_quantiles_are_samples() -> None:
    costs = Costs()
    assert costs.p99("drain") is None
    for value in range(1, 101):
        costs.add("drain", float(value))
    assert (costs.p99("drain"), costs.quantile("drain", 0.5), costs.quantile("drain", 0.0)) == (99.0, 50.0, 1.0)
    costs = Costs({"seal": [3.0, 1.0]})
    assert costs.p99("seal") == 3.0


def test_they_are_kept_over_attempts_and_bounded(tmp_path: Path) -> None:
    costs = Costs.load(str(tmp_path))
    for value in range(KEEP + 50):
        costs.add("save", float(value))
    costs.save(str(tmp_path))
    again = Costs.load(str(tmp_path))
    assert again.count("save") == KEEP
    assert again.quantile("save", 0.0) == 50.0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_nonsense_is_not_kept(tmp_path: Path, value: float) -> None:
    costs = Costs()
    costs.add("save", value)
    assert costs.count("save") == 0
    (tmp_path / "costs.json").write_text(json.dumps({"version": 1, "samples": {"save": [value, 2.0]}}))
    assert Costs.load(str(tmp_path)).quantile("save", 1.0) == 2.0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2, "samples": {}}', '{"version": 1, "samples": 3}'])
def test_a_file_that_is_none_is_no_harm(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    costs = Costs.load(str(tmp_path))
    costs.add("save", 1.0)
    costs.save(str(tmp_path))
    assert Costs.load(str(tmp_path)).p99("save") == 1.0
