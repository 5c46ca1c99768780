"""Random reads of one tensor: what numpy would give, verified, in bounded memory."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shardworld import ITERATION, World, build

from slurm_resil.core import paths, pins
from slurm_resil.core.errors import DataError, UsageError
from slurm_resil.drain import peek
from slurm_resil.format.manifest import DrainedManifest, Item, digest_of_blocks


def item(array: np.ndarray) -> Item:
    return Item(
        name="a", dtype=f"numpy.{array.dtype.str}", shape=array.shape, offset=0, nbytes=array.nbytes, sharing="plain"
    )


def read_of(array: np.ndarray, sizes: list[int]):
    raw = np.frombuffer(array.tobytes(), np.uint8)

    def read(start: int, stop: int) -> np.ndarray:
        assert 0 <= start < stop <= len(raw)
        sizes.append(stop - start)
        return raw[start:stop].copy()

    return read


def taken(array: np.ndarray, text: str, sizes: list[int] | None = None) -> np.ndarray:
    chosen = peek.select(text, array.shape)
    found = list(peek.parts(item(array), chosen.index, read_of(array, sizes if sizes is not None else [])))
    flat = np.concatenate(found) if found else np.empty(0, array.dtype)
    return flat.reshape(chosen.shape)


PARTS = (":", "0", "-1", "1:", ":-1", "1:3", "::2", "1:9:3", "2:2", "7:1", "...")


@pytest.mark.parametrize("chunk_bytes", [1, 24, 100, 1 << 20])
@pytest.mark.parametrize("shape", [(5,), (4, 3), (2, 5, 3), (1, 7), (3, 1, 2, 4)])
def test_every_part_is_what_numpy_gives(monkeypatch, shape, chunk_bytes):
    monkeypatch.setattr(peek, "CHUNK_BYTES", chunk_bytes)
    array = np.arange(np.prod(shape), dtype="<i4").reshape(shape)
    numbers = random.Random(str(shape))
    ways = list(itertools.product(PARTS, repeat=len(shape)))
    for way in numbers.sample(ways, min(len(ways), 150)):
        if way.count("...") > 1:
            continue
        text = ",".join(way)
        expected = eval(f"array[{text}]")  # what numpy makes of the same text
        sizes: list[int] = []
        np.testing.assert_array_equal(taken(array, text, sizes), expected, err_msg=text)
        assert max(sizes, default=0) <= max(chunk_bytes, 4), text


def test_everything_and_scalars_and_nothing():
    array = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(taken(array, ""), array)
    np.testing.assert_array_equal(taken(array, "1"), array[1])
    np.testing.assert_array_equal(taken(np.array(3.5), ""), 3.5)
    assert taken(np.empty((0, 4)), "").shape == (0, 4)
    assert taken(np.empty((0, 4)), ":,2").shape == (0,)


@pytest.mark.parametrize("text", ["2", "-3", "0,0,0", "a", "1:2:3:4", "::-1", "::0", "1.5", "...,...", "0,,1", "[0]"])
def test_a_part_that_is_none_is_refused_with_the_shape(text):
    with pytest.raises(UsageError, match=r"the shape is \(2, 3\)"):
        peek.select(text, (2, 3))


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = build(tmp_path, ranks=2, per_node=2, scale=2)
    made.seal()
    made.drain()
    return made


def drained(world: World, name: str, rank: int | None = None) -> np.ndarray:
    manifest = DrainedManifest.load(paths.drained_manifest(world.run_dir, ITERATION))
    one = next(i for i in manifest.items if (i.name, i.rank) == (name, rank))
    with peek.drained(world.run_dir, manifest, one) as read:
        found = list(peek.parts(one, peek.select("", one.shape).index, read))
    return np.concatenate(found).reshape(one.shape) if found else np.empty(one.shape)


def test_every_tensor_of_a_drained_file(world, monkeypatch):
    monkeypatch.setattr(peek, "CHUNK_BYTES", 100)
    for name, expected in world.expected.items():
        kind, _, rest = name.partition("/")
        rank, inner = (int(rest.partition("/")[0]), rest.partition("/")[2]) if kind == "ranks" else (None, rest)
        assert drained(world, inner, rank).tobytes() == expected.tobytes(), name


def test_a_damaged_block_is_named_and_nothing_of_it_is_given(world):
    file = paths.drained(world.run_dir, ITERATION)
    path = paths.drained_manifest(world.run_dir, ITERATION)
    manifest = DrainedManifest.load(path)
    # many small blocks, so that only one of them is bad
    raw, size = Path(file).read_bytes(), 512
    blocks = tuple(peek.digest(raw[at : at + size]) for at in range(0, len(raw), size))
    replace(manifest, block_bytes=size, blocks=blocks).publish(path, sync=False)
    same = next(i for i in manifest.items if i.name == "model/same")
    with open(file, "r+b") as out:
        out.seek(same.offset + same.nbytes // 2)
        out.write(bytes([raw[same.offset + same.nbytes // 2] ^ 1]))
    with pytest.raises(DataError, match=r"block \d+ is damaged \(.*model/same"):
        drained(world, "model/same")
    with peek.drained(world.run_dir, DrainedManifest.load(path), same) as read:
        assert read(0, 400).tobytes() == raw[same.offset : same.offset + 400]  # what is far from it is right
    assert drained(world, "model/columns").tobytes() == world.expected["state/model/columns"].tobytes()
    os.truncate(file, len(raw) - 1)
    with pytest.raises(DataError, match="truncated"):
        drained(world, "model/columns")
    os.unlink(file)
    with pytest.raises(DataError, match="missing"):
        drained(world, "model/columns")


def test_a_file_that_is_read_is_pinned(world):
    manifest = DrainedManifest.load(paths.drained_manifest(world.run_dir, ITERATION))
    file = paths.drained(world.run_dir, ITERATION)
    assert not pins.shared(file)
    with peek.drained(world.run_dir, manifest, manifest.items[0]):
        assert pins.shared(file)
    assert not pins.shared(file)


def local(world: World, rank: int, name: str) -> np.ndarray:
    manifest = world.manifest(rank)
    one = next(i for i in manifest.items if i.name == name)
    with peek.local(world.job_dir(0), manifest, one) as read:
        with pins.exclude(world.job_dir(0), ITERATION) as mine:
            assert not mine  # its slot is not given away while it is read
        found = list(peek.parts(one, peek.select("", one.shape).index, read))
    return np.concatenate(found).reshape(one.shape) if found else np.empty(one.shape)


def test_every_item_of_a_shard(world):
    for rank, state in enumerate(world.states):
        for name, one in state.items():
            assert local(world, rank, name).tobytes() == one.data.tobytes(), name


@pytest.mark.parametrize("block_bytes", [0, 512])
def test_of_a_large_item_only_the_blocks_that_are_touched_count(world, monkeypatch, block_bytes):
    """Without blocks, as in manifests of version 1, all of it does."""
    monkeypatch.setattr(peek, "CHUNK_BYTES", 1024)
    array = world.states[0]["model/same"].data
    raw, old = array.tobytes(), world.manifest(0)
    hashes = tuple(peek.digest(raw[at : at + 512]) for at in range(0, len(raw), 512)) if block_bytes else ()
    whole = digest_of_blocks(hashes) if block_bytes else peek.digest(raw)
    changed = [
        replace(one, block_bytes=block_bytes, blocks=hashes, xxh3=whole) if one.name == "model/same" else one
        for one in old.items
    ]
    world.edit(0, items=tuple(changed))
    assert local(world, 0, "model/same").tobytes() == raw
    world.flip(0, "model/same", at=len(raw) - 700)
    manifest = world.manifest(0)
    one = next(i for i in manifest.items if i.name == "model/same")
    try:
        with peek.local(world.job_dir(0), manifest, one) as read:
            assert read(0, 1024).tobytes() == raw[:1024]
            assert block_bytes
            with pytest.raises(DataError, match=r"bytes \d+ to \d+ of model/same of rank 0 do not match"):
                read(1024, len(raw))
    except DataError as error:
        assert not block_bytes and "model/same" in error.message


def test_a_damaged_shard_gives_nothing(world):
    world.flip(0, "model/same")
    with pytest.raises(DataError, match=r"model/same of rank 0 do not match"):
        local(world, 0, "model/same")
    assert local(world, 0, "model/rows").size  # another item is right
    with open(world.slot(1), "r+b") as slot:
        slot.seek(100)  # the frame
        slot.write(b"\x01")
    with pytest.raises(DataError, match="structure"):
        local(world, 1, "model/rows")
    os.unlink(world.slot(0))
    with pytest.raises(DataError, match="missing"):
        local(world, 0, "model/rows")
    manifest = world.manifest(0)
    os.unlink(paths.manifest(world.job_dir(0), ITERATION, 0))
    with pytest.raises(DataError, match="given up"), peek.local(world.job_dir(0), manifest, manifest.items[0]):
        pass
