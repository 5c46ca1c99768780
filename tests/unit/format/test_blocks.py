"""Hashes of items: whole or in blocks, in one pass, and what they say when something does not match."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import xxhash

from slurm_resil.core.errors import DataError
from slurm_resil.format import blocks
from slurm_resil.format.manifest import BLOCK_BYTES, Item, ShardManifest, digest


def data_of(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def hashed(data: bytes, size: int, step: int = 1 << 30) -> blocks.Hashes:
    one = blocks.ItemHash(size)
    for at in range(0, len(data), step):
        one.update(memoryview(data)[at : at + step])
    return one.finish()


def item_of(data: bytes, size: int) -> Item:
    xxh3, each = hashed(data, size)
    return Item(
        name="w",
        dtype="torch.uint8",
        shape=(len(data),),
        global_shape=(len(data),),
        offset=4096,
        nbytes=len(data),
        xxh3=xxh3,
        block_bytes=size,
        blocks=each,
    )


def test_blocks_are_what_the_format_says_in_any_portions() -> None:
    data = data_of(1000)
    each = [xxhash.xxh3_128(data[at : at + 300]) for at in range(0, 1000, 300)]
    whole = xxhash.xxh3_128(b"".join(one.digest() for one in each)).hexdigest()
    for step in (1, 7, 299, 300, 301, 900, 1000, 4000):
        assert hashed(data, 300, step) == (whole, tuple(one.hexdigest() for one in each))
        assert hashed(data, 0, step) == (digest(data), ())
    assert len(hashed(data[:900], 300)[1]) == 3
    assert hashed(b"", 0) == (digest(b""), ())


@pytest.mark.parametrize(("size", "block"), [(0, 0), (1, 0), (BLOCK_BYTES, 0), (BLOCK_BYTES + 1, BLOCK_BYTES)])
def test_only_items_larger_than_a_block_have_blocks(size: int, block: int) -> None:
    assert blocks.block_size(size) == block


def test_what_does_not_match_is_named() -> None:
    data = data_of(1000)
    item = item_of(data, 300)
    assert [blocks.block_range(item, index) for index in range(4)] == [(0, 300), (300, 600), (600, 900), (900, 1000)]
    assert [blocks.block_hash(item, index) for index in range(4)] == list(item.blocks)
    for at, text in ((0, "bytes 0 to 300 of w do"), (599, "bytes 300 to 600 of w do"), (999, "bytes 900 to 1000 of w")):
        bad = bytearray(data)
        bad[at] ^= 1
        assert blocks.flaw(item, hashed(bytes(bad), 300)).startswith(text)
    every = bytes(byte ^ 1 for byte in data)
    assert blocks.flaw(item, hashed(every, 300)) == "bytes 0 to 300 of w and 3 more blocks do not match their hash"
    assert blocks.flaw(item, hashed(data, 300)) == ""
    small = item_of(data, 0)
    assert blocks.flaw(small, hashed(data, 0)) == ""
    assert blocks.flaw(small, hashed(every, 0)) == "the bytes of w do not match their hash"
    # no block tells them apart: blocks of another size, or one that is missing
    assert blocks.flaw(item, hashed(data, 200)) and blocks.flaw(item, hashed(data[:900], 300))


def manifest_of(*items: Item) -> ShardManifest:
    names = ("run_id", "node", "slot")
    numbers = ("job_id", "attempt", "iteration", "rank", "generation")
    return ShardManifest(
        **dict.fromkeys(names, "x"), **dict.fromkeys(numbers, 1), world_size=2, items=items, values={"a": 1}
    )


def load(manifest: ShardManifest) -> ShardManifest:
    return ShardManifest.from_bytes(manifest.to_bytes(), where="here")


def test_a_manifest_comes_back_as_it_was() -> None:
    data = data_of(1000)
    manifest = manifest_of(item_of(data, 300), replace(item_of(data, 0), name="small"))
    assert load(manifest) == manifest
    raw = json.loads(manifest.to_bytes())
    assert raw["version"] == 2
    assert "blocks" in raw["items"][0] and not {"blocks", "block_bytes"} & set(raw["items"][1])


def test_small_items_cost_what_they_did() -> None:
    """Nothing is added to an item that is hashed whole, so that a manifest of very many of them does not grow."""
    items = [replace(item_of(data_of(8, n), 0), name=f"model/layers.{n}.weight") for n in range(200)]
    new = manifest_of(*items)
    assert len(new.to_bytes()) == len(replace(new, version=1).to_bytes())


def test_odd_manifests_are_told() -> None:
    data = data_of(1000)
    item = item_of(data, 300)
    for odd in (
        replace(item, blocks=item.blocks[:-1], xxh3=blocks.digest_of_blocks(item.blocks[:-1])),
        replace(item, block_bytes=0),
        replace(item, block_bytes=-300),
        replace(item, block_bytes=1000),
        replace(item, block_bytes=250),
        replace(item, blocks=item.blocks[::-1]),
        replace(item, xxh3=digest(data)),
        replace(item, blocks=(*item.blocks[:3], "no hexadecimal")),
        replace(item, blocks=(*item.blocks[:3], 7)),
    ):
        if odd.block_bytes == 250:  # as many, and the right hash of them: only the bytes can tell
            assert load(manifest_of(odd)).items == (odd,)
            continue
        with pytest.raises(DataError, match="here is not a ShardManifest: "):
            load(manifest_of(odd))
    for version in (0, 3, "2", None):
        with pytest.raises(DataError, match=f"here has version {version}, this program reads 1 and 2"):
            load(replace(manifest_of(item), version=version))
    with pytest.raises(DataError, match="is not a ShardManifest"):
        load(manifest_of(*"ab"))
