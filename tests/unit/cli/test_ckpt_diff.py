"""``ckpt diff`` as a user calls it, against what numpy says of the same arrays."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "drain"))
sys.path.insert(0, str(Path(__file__).parent))

from command import ckpt
from shardworld import World, build

from slurm_resil.drain import compare as comparing
from slurm_resil.drain.compare import compare, whole
from slurm_resil.format.manifest import DrainedItem


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Iteration 10 drained; then one tensor changes, and 20 is drained too; 30 is 20 again, on the node alone."""
    made = build(tmp_path, ranks=2, per_node=2)
    for state in made.states:
        state["model/rows"].data = np.full_like(state["model/rows"].data, 2)
    made.seal(10, slot=0)
    made.drain(iteration=10)
    for state in made.states:
        state["model/rows"].data = np.full_like(state["model/rows"].data, 3)
    made.seal(20, slot=1)
    made.drain(iteration=20)
    made.seal(30, slot=2)
    return made


def test_of_two_iterations(world):
    done = ckpt("diff", "10", "20", "--json", "--only", "model/*", world=world)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    (change,) = row["tensors"]
    size = world.expected["state/model/rows"].size
    assert (change["name"], change["what"], change["differing"]) == ("model/rows", "changed", size)
    assert change["max_abs"] == 1 and change["compared"] == size
    assert change["relative_l2"] == pytest.approx(0.5)
    assert "model/rows" in ckpt("diff", "10", "20", world=world).stdout


def test_shards_of_the_node_are_put_together_as_a_drain_does(world):
    done = ckpt("diff", "20", "30", "--json", "--only", "*/*", "--all", "--tolerance", "0", world=world)
    row = json.loads(done.stdout)
    assert done.returncode == 0 and {entry["what"] for entry in row["tensors"]} == {"same"}, done.stdout
    assert all(entry["compared"] == entry["elements"] for entry in row["tensors"])
    assert ckpt("diff", "10", "30", "--tolerance", "0", "--only", "model/*", world=world).returncode == 1
    assert ckpt("diff", "10", "30", "--tolerance", "1.1", "--only", "model/*", world=world).returncode == 0


def test_with_an_export(world, tmp_path):
    file = str(tmp_path / "out.safetensors")
    assert ckpt("export", "20", file, "--only", "model/*", "--strip", "model/", world=world).returncode == 0
    drained = f"{world.run_dir}/ckpt-0000000020.h5"
    arguments = ("--strip", "model/", "--tolerance", "0", "--json")
    row = json.loads(ckpt("diff", drained, file, *arguments).stdout)
    assert row["counts"]["changed"] == 0 and row["counts"]["added"] == 0 and row["counts"]["removed"] > 0
    assert row["beyond"] is True  # what is not in the export is gone


@pytest.mark.parametrize("arguments", [("10", "99"), ("10", "nowhere.safetensors")])
def test_what_is_not_there(world, arguments):
    done = ckpt("diff", *arguments, world=world)
    assert done.returncode == 2 and arguments[1] in done.stderr


def of(array: np.ndarray, dtype: str):
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    shape = array.shape
    item = DrainedItem(name="x", dtype=dtype, shape=shape, offset=0, nbytes=raw.size)
    return {(None, "x"): whole(item, lambda: nullcontext(lambda start, stop: raw[start:stop]))}


def change_of(a: np.ndarray, one: str, b: np.ndarray, other: str | None = None):
    (change,) = compare(of(a, one), of(b, other or one), lambda _: None)
    return change


def test_whole_numbers_are_exact():
    a = np.array([-(2**63), 0, 2**53], "<i8")
    b = np.array([2**63 - 1, 0, 2**53 + 1], "<i8")
    change = change_of(a, "torch.int64", b)
    assert (change.max_abs, change.differing) == (2**64 - 1, 2)
    u = np.array([2**64 - 1, 5], "<u8")
    assert change_of(u, "torch.uint64", u - np.array([1, 0], "<u8")).max_abs == 1
    flags = np.array([True, False])
    assert change_of(flags, "torch.bool", ~flags).max_abs == 1


def test_nan_infinity_and_zeros():
    a = np.array([np.nan, np.nan, np.inf, -np.inf, 0.0, 3.0], "<f4")
    b = np.array([np.nan, 1.0, np.inf, np.inf, -0.0, 7.0], "<f4")
    change = change_of(a, "torch.float32", b)
    assert (change.nan, change.infinite, change.differing, change.odd) == ((2, 1), (2, 2), 3, 2)
    assert change.max_abs == 4 and change.relative_l2 == pytest.approx(4 / 3) and change.beyond(100)


def test_bfloat16_float8_and_complex_by_their_values():
    bits = np.array([0x3F80, 0x4000], "<u2")  # 1, 2
    change = change_of(bits, "torch.bfloat16", np.array([1.0, 2.5], "<f4"), "torch.float32")
    assert (change.differing, change.max_abs, change.what) == (1, 0.5, "changed") and change.beyond(1)
    eights = np.array([0x38, 0x40], np.uint8)  # 1, 2 as e4m3fn
    assert change_of(eights, "torch.float8_e4m3fn", eights[::-1]).max_abs == 1
    numbers = np.array([3 + 4j, 1], "<c8")
    assert change_of(numbers, "torch.complex64", np.zeros(2, "<c8")).max_abs == 5
    dates = np.array(["2026-01-01", "2026-01-02"], "<M8[D]")
    change = change_of(dates, "numpy.<M8[D]", dates[::-1])
    assert (change.differing, change.max_abs) == (2, None) and change.beyond(1e9)


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_norms_of_what_overflows_when_squared(scale):
    a = np.array([3.0, 4.0]) * scale
    assert change_of(a, "torch.float64", a * 2).relative_l2 == pytest.approx(1)


def test_pieces_are_bounded(monkeypatch):
    monkeypatch.setattr(comparing, "ELEMENTS", 7)
    a = np.arange(100, dtype="<f4")
    change = change_of(a, "torch.float32", a + 1)
    assert (change.compared, change.differing) == (100, 100)
    assert change.relative_l2 == pytest.approx(10 / np.linalg.norm(a))
