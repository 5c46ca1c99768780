"""The shards of all ranks as a source: any cut of a tensor from any other, only what is needed, and nothing bad."""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import ckptworld as w
import numpy as np
import pytest
import torch

from slurm_resil.ckpt.shards import ShardsSource
from slurm_resil.ckpt.snapshot import Arena
from slurm_resil.ckpt.state import Sharded
from slurm_resil.core import paths
from slurm_resil.core.errors import DataError, StateError
from slurm_resil.format import layout
from slurm_resil.format.manifest import Extent

pytestmark = pytest.mark.torch

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]  # starts and shapes in the whole


def cut(whole: torch.Tensor, boxes: Boxes, *, strides: bool = False) -> Sharded:
    """A rank's part: boxes one after the other in the first dimension of the local tensor."""
    inner = [shape[1:] for _, shape in boxes]
    assert all(shape == inner[0] for shape in inner)
    data = torch.cat([whole[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] for box in boxes])
    extents, at = [], 0
    for start, shape in boxes:
        extents.append(Extent(local=(at, *[0] * (len(shape) - 1)), start=start, shape=shape))
        at += shape[0]
    if strides and data.numel():  # every other element of something larger
        wide = torch.zeros(*data.shape[:-1], 2 * data.shape[-1], dtype=data.dtype)
        wide[..., ::2] = data
        data = wide[..., ::2]
    return Sharded(tensor=data if strides else data.clone(), global_shape=tuple(whole.shape), extents=tuple(extents))


def all_of(whole: torch.Tensor) -> Sharded:
    return cut(whole, [((0,) * whole.ndim, tuple(whole.shape))])


def spans(rng: random.Random, size: int, count: int) -> list[tuple[int, int]]:
    edges = [0, *sorted(rng.randint(0, size) for _ in range(count - 1)), size]
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


def grid(rng: random.Random, shape: tuple[int, ...], ranks: int) -> list[Boxes]:
    """Boxes of each rank that tile a tensor: some ranks may have none, some several, as in strided shards."""
    per_dim = [spans(rng, size, rng.randint(1, 3)) for size in shape]
    cells: list[tuple[Any, ...]] = [
        tuple(zip(*cell, strict=True)) for cell in itertools.product(*per_dim) if all(n for _, n in cell)
    ]
    found: list[Boxes] = [[] for _ in range(ranks)]
    for cell in cells:
        options = [own for own in found if not own or own[0][1][1:] == cell[1][1:]]
        (rng.choice(options) if options else rng.choice(found)).append(cell)
    return found


def part(whole: torch.Tensor, boxes: Boxes, **more: Any) -> Sharded:
    if not boxes:
        empty = torch.empty(0, *whole.shape[1:], dtype=whole.dtype)
        return Sharded(tensor=empty, global_shape=tuple(whole.shape), extents=())
    return cut(whole, boxes, **more)


@pytest.mark.parametrize("seed", range(40))
def test_any_cut_from_any_other(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 4)))
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
    whole = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(dtype)
    job, old, new = w.job(tmp_path), rng.randint(1, 4), rng.randint(1, 5)
    while True:  # cells of one rank must stack
        before, after = grid(rng, shape, old), grid(rng, shape, new)
        if all(len({shape[1:] for _, shape in own}) <= 1 for own in (*before, *after)):
            break
    for rank in range(old):
        w.save_new(job, {"w": part(whole, before[rank])}, rank=rank, world_size=old)
    for rank in range(new):
        state = {"w": part(torch.zeros_like(whole), after[rank], strides=rng.random() < 0.3)}
        restored = w.load_shards(job, state, rank, new)
        expected = part(whole, after[rank]).tensor
        assert torch.equal(state["w"].tensor, expected)
        assert restored.wanted_bytes == expected.numel() * expected.element_size()
    one = {"w": all_of(torch.zeros_like(whole))}
    w.load_shards(job, one, 0, 1)
    assert torch.equal(one["w"].tensor, whole)


MIB = 1 << 20


@pytest.fixture
def large(tmp_path: Path) -> tuple[str, torch.Tensor]:
    """Two ranks, with two blocks each of a tensor of rows of 4 KiB."""
    whole = torch.arange(4 * MIB, dtype=torch.int32).reshape(4096, 1024)
    job = w.job(tmp_path)
    for rank in (0, 1):
        state = {"w": cut(whole, [((2048 * rank, 0), (2048, 1024))])}
        w.save_new(job, state, rank=rank, world_size=2)
    return job, whole


@pytest.mark.parametrize(
    ("start", "shape", "read"),
    [
        ((0, 0), (1024, 1024), 4),
        ((1024, 0), (1024, 1024), 4),
        ((3000, 0), (10, 1024), 4),
        ((1000, 0), (100, 1024), 8),
        ((2000, 0), (100, 1024), 8),  # the end of one shard and the begin of the other
        ((0, 0), (4096, 1024), 16),
        ((0, 100), (4096, 3), 16),  # a column lies in all blocks
        ((4095, 1023), (1, 1), 4),
        ((0, 0), (0, 1024), 0),
    ],
)
def test_only_the_blocks_that_are_needed_are_read(large, start, shape, read) -> None:
    job, whole = large
    state = {"w": part(torch.zeros_like(whole), [(start, shape)])}
    restored = w.load_shards(job, state, 0, 3)
    assert torch.equal(state["w"].tensor, cut(whole, [(start, shape)]).tensor)
    assert (restored.wanted_bytes, restored.read_bytes) == (4 * math.prod(shape), read * MIB)


def test_of_long_rows_only_the_blocks_of_the_columns_are_read(tmp_path: Path) -> None:
    whole = torch.arange(6 * MIB, dtype=torch.int32).reshape(2, 3 * MIB)  # rows of three blocks
    job = w.job(tmp_path)
    w.save_new(job, {"w": all_of(whole)})
    state = {"w": cut(torch.zeros_like(whole), [((0, MIB), (2, 1000))])}
    restored = w.load_shards(job, state, 1, 2)
    assert torch.equal(state["w"].tensor, whole[:, MIB : MIB + 1000])
    assert restored.read_bytes == 8 * MIB


def test_damage_where_nothing_is_needed_harms_nobody(large) -> None:
    job, whole = large
    item = w.shards(job)[1].items[0]
    w.flip(paths.slot(job, 1, 0), item.offset + 5 * MIB)
    state = {"w": cut(torch.zeros_like(whole), [((2048, 0), (1000, 1024))])}
    w.load_shards(job, state, 0, 2)
    assert torch.equal(state["w"].tensor, whole[2048:3048])
    state = {"w": cut(torch.zeros_like(whole), [((2048, 0), (2000, 1024))])}
    with pytest.raises(DataError, match=r"1-0.h5: bytes 4194304 to 8388608 of w do not match their hash") as caught:
        w.load_shards(job, state, 0, 2)
    assert caught.value.context["rank"] == 1 and caught.value.context["fault"] == "flipped"
    assert not state["w"].tensor.any()


def hsdp(job: str) -> torch.Tensor:
    """Ranks 0 and 2 hold the first half, 1 and 3 the second; a plain tensor, equal on all; two blocks each."""
    whole = torch.arange(3 * MIB, dtype=torch.int32).reshape(-1, 1024)
    for rank in range(4):
        half = cut(whole, [((rank % 2 * 1536, 0), (1536, 1024))])
        w.save_new(job, {"w": half, "plain": torch.arange(5)}, rank=rank, world_size=4)
    return whole


def test_a_good_copy_takes_the_place_of_a_bad_one(tmp_path: Path, caplog) -> None:
    job = w.job(tmp_path)
    whole = hsdp(job)
    offset = w.shards(job)[0].items[0].offset
    w.flip(paths.slot(job, 0, 0), offset)  # first block of rank 0, second one of its replica
    w.flip(paths.slot(job, 2, 0), offset + 5 * MIB)
    os.unlink(paths.slot(job, 1, 0))
    state = {"w": all_of(torch.zeros_like(whole)), "plain": torch.zeros(5, dtype=torch.int64)}
    rows = [
        {"w": cut(torch.zeros_like(whole), [((at, 0), (512, 1024))]), "plain": torch.zeros(5).long()}
        for at in (0, 1024)
    ]
    with caplog.at_level(logging.ERROR):
        for at, one in zip((0, 1024), rows, strict=True):
            w.load_shards(job, one, 0, 2)
            assert torch.equal(one["w"].tensor, whole[at : at + 512]) and one["plain"].tolist() == [0, 1, 2, 3, 4]
    assert "bytes 0 to 4194304 of w do not match" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.ERROR), pytest.raises(DataError, match="bytes 0 to 4194304 of w"):
        w.load_shards(job, state, 0, 1)  # no copy of the whole first half is good
    assert not state["w"].tensor.any()


def test_all_copies_bad(tmp_path: Path) -> None:
    job = w.job(tmp_path)
    whole = hsdp(job)
    item = w.shards(job)[0].items[1]
    for rank in range(4):
        w.flip(paths.slot(job, rank, 0), item.offset)
    state = {"w": all_of(torch.zeros_like(whole)), "plain": torch.zeros(5).long()}
    with pytest.raises(DataError, match="the bytes of plain do not match"):
        w.load_shards(job, state, 0, 1)
    assert not state["w"].tensor.any()


def tensors(job: str, world: int = 2, **more: Any) -> list[Any]:
    whole = torch.arange(12.0).reshape(6, 2)
    for rank in range(world):
        rows = cut(whole, [((6 // world * rank, 0), (6 // world, 2))])
        w.save_new(job, {"a": {"w": rows}}, rank=rank, world_size=world, **more)
    return w.shards(job, more.get("iteration", 1))


def test_a_gap_is_named(tmp_path: Path) -> None:
    job = w.job(tmp_path)
    first, second = tensors(job)
    (item,) = second.items
    (extent,) = item.extents
    for extents, text in (
        (
            (replace(extent, start=(4, 0), shape=(2, 2)),),
            r"a/w \[6, 2\]: \[3:4, 0:2\] is missing in the shards of ranks 0-1",
        ),
        ((), r"\[3:6, 0:2\] is missing"),
        ((replace(extent, start=(2, 0)),), r"\[2:3, 0:2\] is there 2 times"),
        ((replace(extent, start=(4, 0)),), r"\[4:7, 0:2\] is not inside \[6, 2\]"),
        ((replace(extent, local=(1, 0)),), r"a/w: an extent of rank 1 on n0 is outside of its tensor \[3, 2\]"),
    ):
        broken = replace(second, items=(replace(item, extents=extents),))
        with pytest.raises(DataError, match=text), ShardsSource(job, [first, broken], 0) as source:
            source.is_global("a/w")
    broken = replace(second, items=(replace(item, global_shape=(6, 3)),))
    with pytest.raises(DataError, match=r"a/w: global_shape is \(6, 2\) for rank 0 on n0 but \(6, 3\) for rank 1"):
        ShardsSource(job, [broken, first], 0).is_global("a/w")
    broken = replace(second, items=(replace(item, nbytes=7),))
    with pytest.raises(DataError, match=r"7 bytes at \d+ for shape \[3, 2\] of torch.float32 on rank 1"):
        ShardsSource(job, [broken, first], 0).is_global("a/w")


def test_shards_that_make_no_checkpoint(tmp_path: Path) -> None:
    job = w.job(tmp_path)
    first, second = tensors(job)
    for odd, text in (
        ([first], "iteration 1: no shard of rank 1"),
        ([], "there is no shard"),
        ([first, second, second], "rank 1 there twice"),
        ([first, replace(second, attempt=3)], "attempt is 0 for rank 0 on n0, 3 for rank 1"),
        ([first, replace(second, iteration=3)], "iteration is 1 for rank 0 on n0, 3 for rank 1"),
        ([first, replace(second, run_id="x")], "run_id is r1 for rank 0"),
    ):
        with pytest.raises(DataError, match=text):
            ShardsSource(job, odd, 0)


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    job = w.job(tmp_path)
    for rank in (0, 1):
        w.save_new(job, {"w": cut(torch.full((4,), float(rank)), [((0,), (4,))])}, rank=rank, world_size=2)
    with pytest.raises(DataError, match="w: rank 0 on n0 and rank 1 on n0 hold the same part with different contents"):
        w.load_shards(job, {"w": all_of(torch.zeros(4))}, 0, 1)


def test_a_state_that_does_not_fit(tmp_path: Path) -> None:
    job = w.job(tmp_path)
    tensors(job)
    for wrong, text in (
        (torch.zeros(6, 2).half(), "a/w: torch.float32 in the checkpoint, torch.float16 in the state"),
        (torch.zeros(2, 6), r"a/w: shape \(6, 2\) in the checkpoint, \(2, 6\) in the state"),
    ):
        with pytest.raises(StateError, match=text):
            w.load_shards(job, {"a": {"w": Sharded(tensor=wrong, global_shape=tuple(wrong.shape), extents=())}}, 0, 3)


def test_a_slot_that_is_written_while_it_is_read(tmp_path: Path, monkeypatch) -> None:
    job = w.job(tmp_path)
    arenas = [Arena(job, rank, slots=2) for rank in (0, 1)]
    state = {"w": torch.ones(6)}
    for rank, arena in enumerate(arenas):
        w.save(arena, job, {**state, "own": torch.full((2,), rank)}, world_size=2)
    fill = ShardsSource.fill

    def slow(self, want, target) -> None:
        fill(self, want, target)
        w.save(arenas[0], job, {"w": torch.zeros(6), "own": torch.zeros(2).long()}, iteration=2, world_size=2)

    monkeypatch.setattr(ShardsSource, "fill", slow)
    with pytest.raises(DataError, match="stale"):
        w.load_shards(job, {"w": torch.zeros(6), "own": torch.zeros(2).long()}, 0, 2)
    for arena in arenas:
        arena.close()


def test_private_state_needs_a_policy(tmp_path: Path) -> None:
    job = w.job(tmp_path)
    for rank in range(3):
        state = {"same": torch.arange(4), "own": torch.full((2,), rank), "n": rank, "empty": torch.empty(0)}
        w.save_new(job, state, rank=rank, world_size=3)

    def other() -> dict[str, Any]:
        return {"same": torch.zeros(4).long(), "own": torch.full((2,), 7), "n": 7, "empty": torch.empty(0)}

    with pytest.raises(StateError, match="changed from 3, and this state is each rank's own: own, n"):
        w.load_shards(job, other(), 0, 2)
    for rank in range(5):
        one = other()
        w.load_shards(job, one, rank, 5, private="rank_mod")
        assert (one["same"].tolist(), one["own"].tolist(), one["n"]) == ([0, 1, 2, 3], [rank % 3] * 2, rank % 3)
        one = other()
        w.load_shards(job, one, rank, 5, private="fresh")
        assert (one["same"].tolist(), one["own"].tolist(), one["n"]) == ([0, 1, 2, 3], [7, 7], 7)
    for rank in range(3):
        one = other()
        w.load_shards(job, one, rank, 3)
        assert (one["own"].tolist(), one["n"]) == ([rank] * 2, rank)
    with ShardsSource(job, w.shards(job), None) as source:
        assert source.is_global("same") and source.is_global("empty") and not source.is_global("own")
        assert not source.is_global("nothing")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_type_and_every_kind_of_place(tmp_path: Path) -> None:
    rng = random.Random(1)
    state: dict[str, Any] = {}
    for name in layout.TORCH_DTYPES:
        dtype = getattr(torch, name.removeprefix("torch."), None)
        if dtype is not None:
            raw = torch.frombuffer(bytearray(rng.randbytes(16 * 6)), dtype=torch.uint8)
            raw = raw % 2 if dtype is torch.bool else raw
            state[name] = raw[: 6 * layout.itemsize(name)].view(dtype).reshape(2, 3).clone()
    state["scalar"], state["array"] = torch.tensor(3.5), np.arange(6, dtype=">i4").reshape(2, 3)
    state["turned"] = torch.arange(6.0).reshape(2, 3).t()
    state["fortran"] = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    state["text"] = np.array(["ab", "c"])
    state["conj"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    state["negative"] = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert state["negative"].is_neg() and state["conj"].is_conj()
    expected = w.bits(state)
    job = w.job(tmp_path)
    w.save_new(job, state)
    with torch.no_grad():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.copy_(torch.zeros(value.shape, dtype=value.dtype))
            else:
                value[...] = "" if value.dtype.kind == "U" else 0
    assert w.bits(state) != expected
    w.load_shards(job, state, 0, 1)
    assert w.bits(state) == expected
