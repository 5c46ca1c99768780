"""What an older version wrote is read: a checkpoint of two ranks, recorded when shard manifests had version 1."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import ckptworld as w
import pytest
import torch

from slurm_resil.ckpt import seal
from slurm_resil.ckpt.state import Sharded
from slurm_resil.core import paths
from slurm_resil.core.errors import DataError
from slurm_resil.drain import check
from slurm_resil.format.manifest import Extent

sys.path.append(str(Path(__file__).resolve().parents[1] / "format"))
import independent_reader as reader

pytestmark = pytest.mark.torch

RECORDED = Path(__file__).resolve().parents[2] / "data" / "format-1.tar.xz"
ROWS = torch.arange(14.0).reshape(7, 2)


def part(rank: int, world: int, whole: torch.Tensor) -> Sharded:
    if world == 1:
        start, count = 0, 7
    else:
        start, count = ((0, 4), (4, 3))[rank]
    extent = Extent(local=(0, 0), start=(start, 0), shape=(count, 2))
    return Sharded(tensor=whole[start : start + count].clone(), global_shape=(7, 2), extents=(extent,))


def state(rank: int, world: int = 2) -> dict[str, object]:
    """What was saved."""
    return {
        "large": torch.arange(1_300_000, dtype=torch.int32) // 5000,  # more than one block of today
        "rows": part(rank, world, ROWS),
        "half": torch.arange(9).to(torch.bfloat16),
        "own": torch.full((3,), rank),
        "empty": torch.empty(0, 2),
        "name": f"rank {rank}",
    }


def other(rank: int, world: int = 2) -> dict[str, object]:
    return {
        "large": torch.zeros(1_300_000, dtype=torch.int32),
        "rows": part(rank, world, torch.zeros(7, 2)),
        "half": torch.zeros(9).to(torch.bfloat16),
        "own": torch.zeros(3, dtype=torch.int64),
        "empty": torch.empty(0, 2),
        "name": "",
    }


def bits(one: dict[str, object]) -> object:
    return w.bits({key: value.tensor if isinstance(value, Sharded) else value for key, value in one.items()})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with tarfile.open(RECORDED) as archive:
        for member in archive:
            if file := archive.extractfile(member):
                path = tmp_path / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())
    return tmp_path


def test_it_is_of_that_version(root: Path) -> None:
    manifests = w.shards(w.job(root), 3)
    assert [one.version for one in manifests] == [1, 1]
    assert not any(item.blocks for one in manifests for item in one.items)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_way_to_restore(root: Path, rank: int) -> None:
    job = w.job(root)
    loads = {
        "local": lambda one: w.load(job, one, iteration=3, rank=rank),
        "shards": lambda one: w.load_shards(job, one, rank, 2, iteration=3),
        "drained": lambda one: w.load_drained(str(root / "r1"), one, rank, 2, iteration=3),
    }
    for load in loads.values():
        one = other(rank)
        load(one)
        assert bits(one) == bits(state(rank))
    assert reader.shard(Path(job), 3, rank)["name"] == f"rank {rank}"


@pytest.mark.parametrize("way", ["shards", "drained", "drained again"])
def test_one_rank_restores_from_both(root: Path, way: str) -> None:
    job, one = w.job(root), other(0, 1)
    if way == "shards":
        w.load_shards(job, one, 0, 1, iteration=3, private="rank_mod")
    else:
        run = root / "r1"
        if way == "drained again":  # by the drain of today
            Path(paths.drained_manifest(str(run), 3)).unlink()
            assert w.drain(job, str(run), iteration=3).iteration == 3
        w.load_drained(str(run), one, 0, 1, iteration=3, private="rank_mod")
    assert bits(one) == bits(state(0, 1))


def test_damage_is_found(root: Path) -> None:
    job = w.job(root)
    manifest = w.shards(job, 3)[0]
    seal.verify(job, manifest)
    assert check.shard_flaws(job, 3) == [] and check.drained_flaws(str(root / "r1"), 3) == []
    for item in manifest.items:
        if item.offset is None:
            continue
        at = item.offset + item.nbytes - 1
        w.flip(paths.slot(job, 0, 0), at)
        with pytest.raises(DataError, match=f"the bytes of {item.name} do not match their hash"):
            seal.verify(job, manifest)
        assert len(check.shard_flaws(job, 3)) == 1
        w.flip(paths.slot(job, 0, 0), at)
