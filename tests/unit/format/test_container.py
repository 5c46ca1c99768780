from __future__ import annotations

import os
import shutil
import subprocess

import h5py
import numpy as np
import pytest

from slurm_resil.core.errors import DataError, UsageError
from slurm_resil.format import container, layout
from slurm_resil.format.container import Spec

EVERY = (*layout.TORCH_DTYPES, "numpy.>i4", "numpy.<U3", "numpy.|V7", "numpy.<M8[ns]", "numpy.>c16", "json", "bytes")


def write(path: str, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    assert os.pwrite(fd, data, offset) == len(data)
    os.close(fd)


@pytest.mark.parametrize("user_block", [0, 512, container.USER_BLOCK_BYTES])
def test_raw_bytes_at_the_offsets_are_the_data(tmp_path, user_block):
    path = str(tmp_path / "a.h5")
    specs = [Spec(path=f"/state/m/{n}", dtype=dtype, shape=(3, 5)) for n, dtype in enumerate(EVERY)]
    specs += [Spec(path="/state/scalar", dtype="torch.float64", shape=()), Spec(path="/e", dtype="json", shape=(0, 4))]
    made = container.create_skeleton(path, specs, attributes={"run": "é"}, user_block_bytes=user_block)
    assert made.file_bytes == os.path.getsize(path)
    assert made.offsets[-1] is None
    data = {}
    for spec, offset in zip(specs, made.offsets, strict=True):
        if offset is not None:
            assert offset % layout.ALIGNMENT_BYTES == 0
            assert offset >= user_block
            data[spec.path] = os.urandom(layout.nbytes(spec.dtype, spec.shape))
            write(path, offset, data[spec.path])
    with h5py.File(path, "r") as file:
        for name, raw in data.items():
            read = np.empty(len(raw), np.uint8)
            file[name].id.read(h5py.h5s.ALL, h5py.h5s.ALL, read, mtype=file[name].id.get_type())
            assert read.tobytes() == raw, name
    attributes, found = container.read_index(path)
    assert attributes == {"run": "é"}
    by_path = {entry.path: entry for entry in found}
    assert {p: e.offset for p, e in by_path.items()} == {s.path: o for s, o in zip(specs, made.offsets, strict=True)}
    assert all(by_path[spec.path].dtype == spec.dtype for spec in specs)


def test_values_read_as_what_they_are(tmp_path):
    """An ordinary reader sees numbers: bfloat16 and float8 are float types of HDF5."""
    path = str(tmp_path / "a.h5")
    raw = {
        "torch.bfloat16": np.array([0x3F80, 0xC040], "<u2"),  # 1, -3
        "torch.float8_e4m3fn": np.array([0x38, 0xC4], "u1"),
        "torch.float8_e5m2": np.array([0x3C, 0xC2], "u1"),
        "torch.float16": np.array([1, -3], "<f2"),
        "torch.complex64": np.array([1, -3], "<c8"),
    }
    specs = [Spec(path=f"/{dtype}", dtype=dtype, shape=(2,)) for dtype in raw]
    made = container.create_skeleton(path, specs)
    for spec, offset in zip(specs, made.offsets, strict=True):
        write(path, offset, raw[spec.dtype].tobytes())
    with h5py.File(path, "r") as file:
        for dtype in raw:
            assert file[f"/{dtype}"][...].tolist() == [1, -3], dtype


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="needs h5dump (hdf5-tools)")
def test_h5dump_reads_it(tmp_path):
    path = str(tmp_path / "a.h5")
    made = container.create_skeleton(
        path, [Spec(path="/x", dtype="torch.bfloat16", shape=(2,))], user_block_bytes=container.USER_BLOCK_BYTES
    )
    write(path, made.offsets[0], np.array([0x3F80, 0xC040], "<u2").tobytes())
    text = subprocess.run(["h5dump", path], capture_output=True, text=True, check=True).stdout
    assert "1, -3" in text


def test_many_and_odd_names(tmp_path):
    path = str(tmp_path / "a.h5")
    names = [layout.join("m", key) for key in ("a/b", "", ".", "..", "é", "x" * 5000, "\x00", 3, "3")]
    specs = [Spec(path=layout.dataset_path(name), dtype="torch.int8", shape=(1,)) for name in names]
    container.create_skeleton(path, specs)
    assert {entry.path for entry in container.read_index(path)[1]} == {spec.path for spec in specs}


def test_nothing_is_overwritten_and_nothing_is_left(tmp_path):
    path = tmp_path / "a.h5"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        container.create_skeleton(str(path), [])
    assert path.read_bytes() == b"precious"
    with pytest.raises(UsageError):
        container.create_skeleton(str(tmp_path / "b.h5"), [Spec(path="/x", dtype="torch.qint8", shape=(1,))])
    assert os.listdir(tmp_path) == ["a.h5"]


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "link.h5").symlink_to(tmp_path / "target.h5")
    with pytest.raises(OSError):
        container.create_skeleton(str(tmp_path / "link.h5"), [])
    assert not (tmp_path / "target.h5").exists()


def test_clashing_names_are_one_clear_error(tmp_path):
    specs = [Spec(path="/x", dtype="json", shape=(1,)), Spec(path="/x/y", dtype="json", shape=(1,))]
    with pytest.raises(UsageError, match="cannot lay out"):
        container.create_skeleton(str(tmp_path / "a.h5"), specs)
    assert os.listdir(tmp_path) == []


def test_what_is_no_hdf5_file_is_told(tmp_path):
    (tmp_path / "a.h5").write_bytes(b"x" * 10000)
    with pytest.raises(DataError, match="not a readable HDF5 file"):
        container.read_index(str(tmp_path / "a.h5"))
    with pytest.raises(FileNotFoundError):
        container.read_index(str(tmp_path / "none.h5"))
