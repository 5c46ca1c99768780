"""``ckpt export`` as a user calls it, read back by the programs that it is for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "drain"))
sys.path.insert(0, str(Path(__file__).parent))

from command import ckpt
from shardworld import Local, World, build

from slurm_resil.core import paths
from slurm_resil.format import layout, safetensors


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two ranks, one node, iteration 10 drained."""
    made = build(tmp_path, ranks=2, per_node=2)
    big = np.arange(3, dtype=">i4")
    for state in made.states:
        state["odd/big"] = Local(big)
    made.seal(10, slot=0)
    made.drain(iteration=10)
    return made


def plain_read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """A reader of the format that knows nothing of the package."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + length])
    about, data = head.pop("__metadata__"), raw[8 + length :]
    kinds = {"F32": "<f4", "F64": "<f8", "I16": "<i2", "I64": "<i8", "U8": "|u1"}
    spans = sorted(tuple(entry["data_offsets"]) for entry in head.values())
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])] and spans[-1][1] == len(data)
    assert (8 + length) % 8 == 0
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], kinds[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in head.items()
    }, about


def test_safetensors(world, tmp_path):
    file = tmp_path / "out.safetensors"
    done = ckpt("export", "10", str(file), "--only", "model/*", "--strip", "model/", "--json", world=world)
    assert done.returncode == 0, done.stderr
    found, about = plain_read(file)
    expected = {name.removeprefix("state/model/"): a for name, a in world.expected.items() if "state/model" in name}
    assert found.keys() == expected.keys() and json.loads(done.stdout)["tensors"] == len(expected)
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes() and found[name].shape == array.shape, name
    assert about["iteration"] == "10" and about["run_id"] == "run-7"


def test_the_reader_of_safetensors_itself_reads_it(world, tmp_path):
    from safetensors import numpy

    file = tmp_path / "out.safetensors"
    assert ckpt("export", "10", str(file), "--only", "model/*", "--rank", "1", world=world).returncode == 0
    found = numpy.load_file(file)
    differs = world.expected["ranks/1/model/differs"]  # what is the rank's own comes along
    assert found["model/differs"].tobytes() == differs.tobytes()
    assert found["model/cube"].tobytes() == world.expected["state/model/cube"].tobytes()


@pytest.mark.torch
def test_torch(world, tmp_path):
    import torch

    file = tmp_path / "out.pt"
    done = ckpt("export", "10", str(file), world=world)
    assert done.returncode == 0, done.stderr
    found = torch.load(file, weights_only=True)
    expected = {name.removeprefix("state/"): a for name, a in world.expected.items() if name.startswith("state/")}
    assert found.keys() == {*expected, "odd/big"}
    for name, array in expected.items():
        assert found[name].numpy().tobytes() == array.tobytes() and tuple(found[name].shape) == array.shape, name
    assert found["odd/big"].tolist() == [0, 1, 2]


@pytest.mark.torch
@pytest.mark.parametrize(("ending", "most"), [("safetensors", 3000), ("pt", 3000)])
def test_large_ones_are_divided_with_an_index_as_hugging_face_has_it(world, tmp_path, ending, most):
    import torch
    from safetensors.torch import load_file

    file = tmp_path / f"model.{ending}"
    arguments = ("--only", "model/*", "--strip", "model/", "--max-shard-size", str(most), "--json")
    done = ckpt("export", "10", str(file), *arguments, world=world)
    assert done.returncode == 0, done.stderr
    names = sorted(name for name in os.listdir(tmp_path) if name.startswith("model-"))
    assert names == [f"model-{n:05}-of-{len(names):05}.{ending}" for n in range(1, len(names) + 1)] and len(names) > 1
    index = json.loads((tmp_path / f"model.{ending}.index.json").read_text())
    expected = {name.removeprefix("state/model/"): a for name, a in world.expected.items() if "state/model" in name}
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in expected.values())
    for name in names:
        path = tmp_path / name
        found = load_file(path) if ending == "safetensors" else torch.load(path, weights_only=True)
        assert sum(t.nbytes for t in found.values()) <= most or len(found) == 1
        for key, tensor in found.items():
            assert index["weight_map"][key] == name
            assert tensor.numpy().tobytes() == expected[key].tobytes(), key
    again = ckpt("export", "10", str(file), "--only", "model/*", world=world)  # whole: the index would win
    assert again.returncode == 2 and "would be read in place" in again.stderr and not file.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("10", "out.safetensors"), 2, "odd/big is of type numpy.>i4"),
        (("10", "out.xyz"), 2, "say --format"),
        (("11", "out.pt"), 2, "not drained"),
        (("10", "out.pt", "--only", "nothing"), 2, "no tensor is chosen"),
        (("10", "none/out.safetensors", "--only", "model/rows"), 1, "cannot write"),
    ],
)
def test_what_cannot_be_exported_is_told_and_leaves_nothing(world, tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    done = ckpt("export", *arguments, world=world)
    assert done.returncode == code and words in done.stderr, done.stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_damage_is_found_on_the_way_and_an_old_export_stays(world, tmp_path):
    file = tmp_path / "out.safetensors"
    file.write_text("the one before")
    path = paths.drained(world.run_dir, 10)
    with open(path, "r+b") as out:
        out.seek(-1, 2)
        byte = out.read(1)[0]
        out.seek(-1, 2)
        out.write(bytes([byte ^ 1]))
    done = ckpt("export", "10", str(file), "--only", "model/*", world=world)
    assert done.returncode == 65 and "is damaged" in done.stderr
    assert file.read_text() == "the one before"
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []


def test_every_type_has_a_name_or_is_said_to_have_none():
    without = {name for name in layout.TORCH_DTYPES if safetensors.dtype_name(name) is None}
    assert without == {*("torch.complex32", "torch.complex128", "torch.float4_e2m1fn_x2")}
    assert safetensors.dtype_name("numpy.<f4") == "F32" and safetensors.dtype_name("numpy.|b1") == "BOOL"
    for name in ("numpy.>f4", "numpy.<U3", "numpy.<M8[s]", "json", "numpy.|V4", "numpy.<c16"):
        assert safetensors.dtype_name(name) is None
