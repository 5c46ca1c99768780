"""A drained file, read in verified blocks."""

from __future__ import annotations

import os

import ckptworld as w
import numpy as np
import pytest
import torch

from slurm_resil.ckpt import verified
from slurm_resil.ckpt.verified import VerifiedFile
from slurm_resil.core.errors import DataError

pytestmark = pytest.mark.torch


@pytest.fixture
def drained(tmp_path):
    """A file of several blocks, the last one shorter, its manifest, and its bytes."""
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    w.save_new(job, {"a": torch.arange(5 << 20, dtype=torch.int32), "b": torch.ones(7)})
    manifest = w.drain(job, run)
    path = os.path.join(run, manifest.file)
    with open(path, "rb") as file:
        return path, manifest, np.frombuffer(file.read(), np.uint8)


@pytest.mark.parametrize("cache", [1, 2, 100], ids="{} blocks".format)
def test_any_range_in_any_order(drained, monkeypatch, cache):
    path, manifest, data = drained
    size = manifest.block_bytes
    monkeypatch.setattr(verified, "CACHE_BYTES", cache * size)
    assert len(manifest.blocks) > 3
    assert len(data) % size
    ranges = [(0, 1), (size - 1, 2), (size, size), (3, 3 * size), (len(data) - 5, 5), (0, len(data)), (7, 9)]
    file = VerifiedFile(path, manifest)
    for _ in range(2):
        for offset, count in ranges:
            assert np.array_equal(file.view(offset, count), data[offset : offset + count])
            out = np.zeros(count, np.uint8)
            file.read_into(offset, out)
            assert np.array_equal(out, data[offset : offset + count])
    if cache == 100:
        assert file.read_bytes == len(data)  # each block once
    file.close()


def test_what_is_read_again_is_verified_again(drained, monkeypatch):
    path, manifest, _ = drained
    monkeypatch.setattr(verified, "CACHE_BYTES", manifest.block_bytes)
    file = VerifiedFile(path, manifest)
    for index in range(len(manifest.blocks)):
        file.block(index)
    w.flip(path, 100)
    with pytest.raises(DataError, match="do not match their hash"):
        file.block(0)
    with pytest.raises(DataError, match="do not match their hash"):
        file.block(0)  # nor is it in the cache now
    file.close()


def test_a_file_that_is_cut_meanwhile(drained):
    path, manifest, _ = drained
    file = VerifiedFile(path, manifest)
    os.truncate(path, manifest.block_bytes + 10)
    with pytest.raises(DataError, match="truncated at byte"):
        file.block(1)
    file.close()
