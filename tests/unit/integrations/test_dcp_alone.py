"""The storage writer and reader in one process: types, plans, planners, damage, full storage, kills."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckptworld as w
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import slurm_resil as sr
from slurm_resil.ckpt import saved

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def save(state: dict[str, Any], path: Path, **more: Any) -> None:
    dcp.save(state, storage_writer=sr.dcp.Writer(path), **more)


def load(state: dict[str, Any], path: Path, *, cast: bool = False, **more: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=sr.dcp.Reader(path, cast=cast), **more)
    return state


def fails(call: Any) -> str:
    with pytest.raises(CheckpointException) as caught:
        call()
    return str(caught.value)


def tensors() -> dict[str, torch.Tensor]:
    raw = torch.arange(48, dtype=torch.uint8)
    names = (
        "bfloat16 float16 float32 float64 complex64 complex128 bool uint8 int8 int16 int32 int64 uint16 uint32 uint64"
    )
    made = {name: raw.view(getattr(torch, name)) if name != "bool" else raw % 2 == 0 for name in names.split()}
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        made[name] = raw.view(getattr(torch, name))
    return {
        **made,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(4, 6).t(),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "key/with.dots and ü": torch.ones(2),
        "x" * 2000: torch.ones(2),
    }


def test_every_type_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = tensors()
    save({"t": state, "list": [torch.ones(2), {"deep": torch.zeros(1)}]}, tmp_path)
    blank = {
        name: torch.zeros_like(value.detach(), memory_format=torch.contiguous_format) for name, value in state.items()
    }
    blank["transposed"] = torch.zeros(4, 6).t()
    got = load({"t": blank, "list": [torch.zeros(2), {"deep": torch.ones(1)}]}, tmp_path)
    for name, value in state.items():
        assert w.bits(got["t"][name]) == w.bits(value), name
    assert w.bits(got["list"]) == w.bits([torch.ones(2), {"deep": torch.zeros(1)}])


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    values = {
        "none": None,
        "big": 1 << 90,
        "nan": float("nan"),
        "text": "ü\n",
        "bytes": b"x" * 9000,
        "tuple": (1, torch.ones(2), np.arange(3), collections.Counter("aab"), {}),
        "list": [1, "a", (2.5,)],
        "array": np.arange(5, dtype=np.float16),
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "generator": np.random.default_rng(3),
    }
    save({"v": values}, tmp_path)
    got = load({"v": dict.fromkeys(values)}, tmp_path)["v"]
    for name, value in values.items():
        assert w.bits(got[name]) == w.bits(value), name


@pytest.mark.parametrize("value", [object(), torch.nn.Linear(1, 1), lambda: 0, (1, object())])
def test_what_cannot_be_stored_is_named_and_nothing_is_published(tmp_path: Path, value: object) -> None:
    save({"a": torch.ones(2)}, tmp_path)
    assert "here.odd" in fails(lambda: save({"a": torch.zeros(2), "here": {"odd": value}}, tmp_path))
    assert load({"a": torch.zeros(2)}, tmp_path)["a"].tolist() == [1, 1]


def test_types_and_shapes_are_checked_before_anything_is_changed(tmp_path: Path) -> None:
    save({"a": torch.ones(2), "b": torch.full((2,), 0.3)}, tmp_path)
    state = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)}
    text = fails(lambda: load(state, tmp_path))
    assert "b: torch.float32 in the checkpoint, torch.bfloat16 in the state" in text
    assert state["a"].tolist() == [0, 0]
    load(state, tmp_path, cast=True)
    assert torch.equal(state["b"], torch.full((2,), 0.3).bfloat16())
    assert "Size mismatch" in fails(lambda: load({"a": torch.zeros(3)}, tmp_path))
    assert "Missing key" in fails(lambda: load({"c": torch.zeros(3)}, tmp_path))


def test_planner_options(tmp_path: Path) -> None:
    class Doubling(DefaultSavePlanner):
        def transform_object(self, write_item, object):  # noqa: A002 -- torch's name
            made = super().transform_object(write_item, object)
            return made * 2 if isinstance(made, torch.Tensor) else made

    save({"d": {"a": torch.ones(2), "n": 3}}, tmp_path, planner=Doubling(dedup_save_to_lowest_rank=True))
    state = {"d": {"a": torch.zeros(2), "new": torch.zeros(1), "n": 0}}
    load(state, tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert (state["d"]["a"].tolist(), state["d"]["n"]) == ([2, 2], 3)
    flat = {"d.a": torch.zeros(2)}
    load(flat, tmp_path, planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert flat["d.a"].tolist() == [2, 2]
    dcp.save(
        {"z": torch.ones(1)},
        storage_writer=sr.dcp.Writer(tmp_path),
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )
    assert load({"z": torch.zeros(1)}, tmp_path)["z"].tolist() == [1]
    with pytest.raises(sr.ResilError, match="use_collectives"):
        dcp.save({"z": torch.ones(1)}, storage_writer=sr.dcp.Writer(tmp_path), use_collectives=False)


def test_checkpoint_id_and_iteration(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        writer = sr.dcp.Writer(tmp_path / "unused", iteration=10 * number, keep=2)
        dcp.save({"n": number}, checkpoint_id=tmp_path / "out", storage_writer=writer)
    assert [one.iteration for one in saved.found(str(tmp_path / "out"))] == [30, 20]
    state = {"n": 0}
    dcp.load(state, checkpoint_id=tmp_path / "out", storage_reader=sr.dcp.Reader(tmp_path, iteration=20))
    assert state["n"] == 2
    assert "has no complete checkpoint of iteration 10" in fails(
        lambda: dcp.load(state, storage_reader=sr.dcp.Reader(tmp_path / "out", iteration=10))
    )


def spots(save_: saved.Save) -> Iterator[tuple[str, int]]:
    """A byte of every tensor, and some of the manifest and the record."""
    (manifest,) = save_.manifests()
    slot = os.path.join(save_.path, "slots", manifest.slot)
    yield from ((slot, item.offset + item.nbytes // 2) for item in manifest.items if item.offset is not None)
    for path in (save_.record, *map(str, Path(save_.path, "manifests").iterdir())):
        yield from ((path, at) for at in range(5, os.path.getsize(path) - 1, os.path.getsize(path) // 9))


def test_a_flipped_bit_is_found_wherever_it_is_and_nothing_is_changed(tmp_path: Path) -> None:
    """torch's own reader loads it and says nothing."""
    save({"a": torch.randn(300), "b": torch.ones(5), "v": (1, torch.ones(3)), "n": 4}, tmp_path)
    (one,) = saved.found(str(tmp_path))
    found = list(spots(one))
    assert len(found) > 20
    for path, at in found:
        w.flip(path, at)
        state = {"a": torch.zeros(300), "b": torch.zeros(5), "v": None, "n": 0}
        text = fails(lambda state=state: load(state, tmp_path))
        assert os.path.basename(path) in text, (path, at, text)
        assert not state["a"].any() and not state["b"].any() and state["n"] == 0
        w.flip(path, at)
    load({"a": torch.zeros(300), "b": torch.zeros(5), "v": None, "n": 0}, tmp_path)


def test_full_storage_is_an_error_and_the_checkpoint_before_stands(tmp_path: Path) -> None:
    """With torch's own writer and two threads, an error of one thread is lost."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", small], capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs")
    try:
        save({"a": torch.ones(10)}, small)
        big = {f"t{n}": torch.ones(20_000) for n in range(8)}
        assert "did not fit" in fails(lambda: save(big, small))
        assert load({"a": torch.zeros(10)}, small)["a"].tolist() == [1] * 10
        save({"a": torch.full((10,), 2.0)}, small)
        assert load({"a": torch.zeros(10)}, small)["a"].tolist() == [2] * 10
        assert len(os.listdir(small)) == 1
    finally:
        subprocess.run(["umount", "-l", small], check=True)


KILLS = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
import slurm_resil as sr
from slurm_resil.core import faults
torch.set_num_threads(1)
root = sys.argv[1]

def state(value):
    return {f"t{n}": torch.full((50,), float(value)) for n in range(3)} | {"n": value}

def load():
    got = state(0)
    dcp.load(got, storage_reader=sr.dcp.Reader(root))
    assert all(bool((got[f"t{n}"] == got["n"]).all()) for n in range(3)), got
    return got["n"]

dcp.save(state(1), storage_writer=sr.dcp.Writer(root))
now, killed = 1, []
for point in ("saved.write", "dcp.slot", "saved.seal", "dcp.sealed", "dcp.finish", "dcp.published", "saved.prune"):
    for times in range(1, 9):
        child = os.fork()
        if not child:
            faults.load(f"{point}:kill@{times}")
            dcp.save(state(now + 1), storage_writer=sr.dcp.Writer(root))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        after = load()
        assert after in (now, now + 1), (point, times, now, after)
        if status == 0:
            assert after == now + 1
        else:
            assert os.WTERMSIG(status) == 9
            assert (after == now + 1) == (point in ("dcp.published", "saved.prune")), (point, times)
            killed.append(point)
        now = after
        if status == 0:
            break
print(*killed)
print(*os.listdir(root))
"""


def test_a_kill_anywhere_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """Killed while it overwrites, torch's own writer leaves old metadata with new bytes."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", KILLS, str(tmp_path / "out")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    killed, left = done.stdout.splitlines()
    points = {"saved.write", "dcp.slot", "saved.seal", "dcp.sealed", "dcp.finish", "dcp.published", "saved.prune"}
    assert set(killed.split()) == points
    assert killed.split().count("saved.write") == 3
    assert len(left.split()) == 1  # and nothing of the killed ones stays


def test_a_drained_checkpoint_and_one_of_async_save_have_torchs_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    (tmp_path / "bb").mkdir()
    monkeypatch.setenv("SLURM_RESIL_BB_ROOT", str(tmp_path / "bb"))
    state = w.training(1, steps=2)
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    w.save_new(job, state)
    w.drain(job, run)
    sr.async_save(state, tmp_path / "out").durable.result(60)
    for path in (run, f"{run}/ckpt-0000000001.h5", tmp_path / "out"):
        other = w.training(2, steps=1)
        model, optimizer = get_state_dict(other["model"], other["optimizer"])
        got = load({"model": model, "optimizer": optimizer, "position": 0}, Path(path))
        want_model, want_optimizer = get_state_dict(state["model"], state["optimizer"])
        assert w.bits(got["model"]) == w.bits(want_model)
        assert w.bits(got["optimizer"]["state"]) == w.bits(want_optimizer["state"])
        assert got["optimizer"]["param_groups"][0]["lr"] == want_optimizer["param_groups"][0]["lr"]
        assert got["position"] == 1


def test_it_loads_without_a_model(tmp_path: Path) -> None:
    save({"m": {"a": torch.arange(5), "n": 3}}, tmp_path / "out")
    state: dict[str, Any] = {}
    # as torch's own format_utils.dcp_to_torch_save does
    _load_state_dict(
        state, storage_reader=sr.dcp.Reader(tmp_path / "out"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert state["m"]["a"].tolist() == [0, 1, 2, 3, 4]
    assert state["m"]["n"] == 3


def test_the_record_is_json_and_other_directories_are_refused(tmp_path: Path) -> None:
    save({"a": torch.ones(1)}, tmp_path / "out")
    (one,) = saved.found(str(tmp_path / "out"))
    assert json.loads(Path(one.record).read_text())["name"] == one.name
    (tmp_path / "run.json").write_text("{}")
    assert "is a job's directory" in fails(lambda: save({"a": torch.ones(1)}, tmp_path))
    with pytest.raises(sr.ResilError, match=r"slurm_resil\.dcp\.Reader"):
        sr.load({"a": torch.zeros(1)}, tmp_path / "out")
