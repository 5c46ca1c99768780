"""Whether the bytes of a mapped slot are what the manifest says."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

from slurm_resil.core.background import Background, share
from slurm_resil.core.errors import DataError
from slurm_resil.format import blocks, frame
from slurm_resil.format import stamp as stamps
from slurm_resil.format.manifest import Item, ShardManifest, digest, digest_of_blocks

_WORK_BYTES = 16 << 20  # hashed by one of several threads before it looks for more


def check_items(
    data: mmap.mmap, manifest: ShardManifest, items: Sequence[Item], where: str, helpers: Sequence[Background] = ()
) -> None:
    """Compare items of a mapped slot and what is around them with their hashes, and the stamp again after that.

    Args:
        data: The mapping.
        manifest: Of the slot.
        items: Some of the manifest's.
        where: The slot, for errors.
        helpers: Threads that hash beside the caller.

    Raises:
        DataError: They differ; ``context["fault"]`` has it in one word, see ckpt.seal.
    """
    found = hashes(data, items, helpers)
    stamps.check(data, manifest, where)
    pairs = zip(items, found, strict=True)
    bad = [flaw for item, one in pairs if (flaw := blocks.flaw(item, one))]
    if bad:
        more = f"; and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise DataError(
            f"{where}: {bad[0]}{more}",
            fault="flipped",
            iteration=manifest.iteration,
        )
    frame.check(lambda start, stop: data[start:stop], manifest, len(data), where)


def hashes(data: mmap.mmap, items: Sequence[Item], helpers: Sequence[Background] = ()) -> list[blocks.Hashes]:
    """Hash items, with threads that hash beside the caller."""
    found = [[""] * blocks.count(item) for item in items]
    with memoryview(data) as view:

        def hash_some(work: Sequence[tuple[int, int]]) -> None:
            for index, block in work:
                item = items[index]
                start, stop = blocks.block_range(item, block)
                at = item.offset or 0
                found[index][block] = digest(view[at + start : at + stop])

        share(hash_some, _portions(items), helpers)
    pairs = zip(items, found, strict=True)
    return [(digest_of_blocks(one), tuple(one)) if item.block_bytes else (one[0], ()) for item, one in pairs]


def _portions(items: Sequence[Item]) -> Iterator[list[tuple[int, int]]]:
    """Cut what is to be hashed, (item, block), into portions of about the same size."""
    portion: list[tuple[int, int]] = []
    size = 0
    for index, item in enumerate(items):
        for block in range(blocks.count(item)):
            portion.append((index, block))
            start, stop = blocks.block_range(item, block)
            size += stop - start
            if size >= _WORK_BYTES:
                yield portion
                portion, size = [], 0
    if portion:
        yield portion
