"""Types and places of the empty file."""

from __future__ import annotations

import itertools
import json
import os
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from slurm_resil.drain.plan import Target
from slurm_resil.drain.skeleton import skeleton

HEAD = SimpleNamespace(run_id="r", iteration=7, world_size=2)


def make(path, *targets):
    return skeleton(str(path), SimpleNamespace(head=HEAD, targets=targets))


def target(dtype: str, shape: tuple[int, ...], size: int, name: str = "a/b", rank: int | None = None) -> Target:
    return Target(name=name, dtype=dtype, shape=shape, nbytes=size * int(np.prod(shape)), rank=rank)


@pytest.mark.parametrize(
    ("dtype", "size", "values", "raw"),
    [
        ("torch.bfloat16", 2, [1.0, -2.5], "803f20c0"),
        ("torch.float8_e4m3fn", 1, [1.0, -2.0], "38c0"),
        ("torch.float8_e5m2", 1, [1.0, -2.0], "3cc0"),
        ("torch.float16", 2, [1.0, -2.0], "003c00c0"),
        ("torch.bool", 1, [True, False], "0100"),
        ("numpy.<i8", 8, [1, -1], "0100000000000000ffffffffffffffff"),
        ("torch.complex64", 8, [1 + 2j, 0], "0000803f000000400000000000000000"),
    ],
)
def test_other_tools_read_the_values(tmp_path, dtype, size, values, raw):
    path = tmp_path / "x.h5"
    offset = make(path, target(dtype, (2,), size))[0]
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(bytes.fromhex(raw))
    with h5py.File(path, "r") as file:
        stored = file["state/a/b"]
        assert stored[()].tolist() == values
        assert json.loads(stored.attrs["dtype"]) == dtype and stored.id.get_storage_size() == 2 * size


def test_unknown_types_keep_their_bytes(tmp_path):
    path = tmp_path / "x.h5"
    make(path, target("torch.float8_e8m0fnu", (3,), 1))
    with h5py.File(path, "r") as file:
        assert file["state/a/b"].id.get_storage_size() == 3


def test_places(tmp_path):
    path = tmp_path / "x.h5"
    targets = [target("torch.float32", (1 << 19,), 4, f"big{i}") for i in range(3)]
    targets += [target("torch.int16", (5,), 2, f"small{i}", rank=i) for i in range(3)]
    targets += [target("torch.int16", (0, 5), 2, "none"), target("torch.float64", (), 8, "scalar")]
    offsets = make(path, *targets)
    assert offsets[6] is None and all(offset % 4096 == 0 for offset in offsets[:3])
    ends = [(o, o + t.nbytes) for o, t in zip(offsets, targets, strict=True) if o is not None]
    ends.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    assert ends[-1][1] <= os.path.getsize(path) < 3 * (1 << 21) + 50_000
    assert os.stat(path).st_blocks * 512 < 100_000  # nothing is written but metadata


def test_an_existing_file_is_never_touched(tmp_path):
    path = tmp_path / "x.h5"
    path.write_bytes(b"here")
    with pytest.raises(OSError, match="exists"):
        make(path)
    assert path.read_bytes() == b"here"
