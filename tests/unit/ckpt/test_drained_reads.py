"""Each rank of any new world reads only the blocks of a drained file that it needs."""

from __future__ import annotations

import ckptworld as w
import pytest
import torch

from slurm_resil.ckpt.options import LoadOptions
from slurm_resil.ckpt.state import Sharded
from slurm_resil.core import paths
from slurm_resil.format.manifest import DrainedManifest, Extent

pytestmark = pytest.mark.torch

ROWS, COLUMNS = 5000, 1024  # 20 MB: five blocks
WIDE = (2, 3 << 20)  # rows of 12 MiB


def span(size: int, world: int, rank: int) -> tuple[int, int]:
    """Start and length of a part, uneven where it does not go up."""
    chunk = -(-size // world)
    start = min(rank * chunk, size)
    return start, min(chunk, size - start)


def part(whole: torch.Tensor, dim: int, world: int, rank: int, *, empty: bool = False) -> Sharded:
    start, size = span(whole.shape[dim], world, rank)
    local = whole.narrow(dim, start, size).contiguous()
    at = [0] * whole.ndim
    at[dim] = start
    extent = Extent(local=(0,) * whole.ndim, start=tuple(at), shape=tuple(local.shape))
    local = torch.zeros_like(local) if empty else local
    return Sharded(tensor=local, global_shape=tuple(whole.shape), extents=(extent,))


def state(wholes: dict, world: int, rank: int, *, empty: bool = False) -> dict:
    return {
        "rows": part(wholes["rows"], 0, world, rank, empty=empty),
        "columns": part(wholes["columns"], 1, world, rank, empty=empty),
        "bias": torch.zeros(7) if empty else torch.arange(7.0),
    }


@pytest.fixture(scope="module")
def drained(tmp_path_factory):
    wholes = {
        "rows": torch.arange(ROWS * COLUMNS, dtype=torch.int32).reshape(ROWS, COLUMNS),
        "columns": torch.arange(2 * WIDE[1], dtype=torch.int32).reshape(WIDE),
    }
    tmp_path = tmp_path_factory.mktemp("reads")
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    for rank in range(2):
        w.save_new(job, state(wholes, 2, rank), rank=rank, world_size=2)
    w.drain(job, run)
    return run, wholes


def needed(run: str, parts: dict, readers: list[int]) -> int:
    """Size of all blocks that hold any byte of some parts, or the values of some ranks."""
    manifest = DrainedManifest.load(paths.drained_manifest(run, 1))
    blocks: set[int] = set()
    for item in manifest.items:
        ranges = [(0, item.nbytes)]
        if item.rank is None and isinstance(one := parts.get(item.name), Sharded):
            (extent,) = one.extents
            whole = torch.arange(item.nbytes // 4).reshape(item.shape)
            box = whole[tuple(slice(a, a + n) for a, n in zip(extent.start, extent.shape, strict=True))]
            runs = [box.reshape(-1)] if box.is_contiguous() else list(box)
            ranges = [(int(run[0]) * 4, int(run[-1]) * 4 + 4) for run in runs if len(run)]
        elif item.rank not in readers if item.name == "values" else item.name not in parts:
            continue
        for start, stop in ranges:
            first, last = item.offset + start, item.offset + stop - 1
            blocks.update(range(first // manifest.block_bytes, last // manifest.block_bytes + 1))
    size = manifest.block_bytes
    return sum(min(size, manifest.file_bytes - block * size) for block in blocks)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_bytes_that_are_read(drained, world):
    run, wholes = drained
    for rank in range(world):
        other, want = state(wholes, world, rank, empty=True), state(wholes, world, rank)
        restored = w.load_drained(run, other, rank, world)
        for name in ("rows", "columns"):
            assert torch.equal(other[name].tensor, want[name].tensor)
        assert torch.equal(other["bias"], want["bias"])
        assert restored.wanted_bytes == sum(want[name].tensor.nbytes for name in ("rows", "columns")) + 28
        assert restored.read_bytes == needed(run, want, [rank] if world == 2 else [0, 1])
        if world > 2:
            assert restored.read_bytes < sum(whole.nbytes for whole in wholes.values()) * 0.75


@pytest.mark.parametrize("pattern", ["rows", "columns", "bias"])
@pytest.mark.parametrize("rank", [0, 3])
def test_what_is_left_out_is_not_read(drained, pattern, rank):
    run, wholes = drained
    other = state(wholes, 4, rank, empty=True)
    restored = w.load_drained(run, other, rank, 4, options=LoadOptions(include=pattern))
    assert restored.wanted_bytes == (28 if pattern == "bias" else other[pattern].tensor.nbytes)
    assert restored.read_bytes == needed(run, {pattern: other[pattern]}, [0, 1])
