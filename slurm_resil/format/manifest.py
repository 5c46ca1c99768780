"""Manifests: what a shard or a drained checkpoint holds, where its bytes lie and what they hash to.

A manifest is published last, by rename; its presence says that what it describes was complete and hashed.
It carries a hash of itself, so that a torn or edited one is told apart from a good one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import xxhash

from slurm_resil.core import fsio, garbage
from slurm_resil.core.errors import DataError

BLOCK_BYTES = 4 << 20
_OF_BLOCKS = ("blocks", "block_bytes")  # an item that is hashed whole is written without them


def digest(data: Any) -> str:
    """Hash bytes (any buffer): xxh3, 128 bits, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_blocks(blocks: Iterable[str]) -> str:
    """Hash of something that is hashed in blocks: that of their digests, one after the other."""
    return digest(bytes.fromhex("".join(blocks)))


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A hyper-rectangle of a local tensor and its place in the global tensor, in elements."""

    local: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One tensor or array of a shard.

    Attributes:
        name: Path in the state, parts percent-encoded and joined by ``/``.
        dtype: ``torch.bfloat16``, ``numpy.int64``...: the exact type in memory.
        shape: Local shape, elements.
        offset: Where its bytes start in the slot file, bytes; None for an empty one (zero-size data has no place).
        nbytes: Size, bytes, contiguous row-major.
        sharing: ``sharded`` (a part of a global tensor), ``plain`` (every rank has the name; the drain stores it once
            if all ranks' hashes agree, else per rank) or ``private`` (always per rank).
        global_shape: Shape of the global tensor; equal to ``shape`` unless sharded.
        extents: Where the local tensor lies in the global one; empty unless sharded.
        xxh3: Hash of the bytes, filled in by the seal; with ``blocks`` that of their digests.
        block_bytes: Size of a hashed block, the last one may be shorter; 0 if the item is hashed whole.
        blocks: Hashes of the blocks, empty if the item is hashed whole; see :mod:`slurm_resil.format.blocks`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int | None
    nbytes: int
    sharing: str = "plain"
    global_shape: tuple[int, ...] = ()
    extents: tuple[Extent, ...] = ()
    xxh3: str = ""
    block_bytes: int = 0
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Document:
    """Shared by the manifests: JSON with a hash of itself.

    Attributes:
        ADDED: Fields that came later: a manifest without them is an older one, and their defaults hold. Empty ones are
            left out, so that older readers read what does not need them.
        READS: Versions that can be read; the last one is written.
    """

    ADDED: ClassVar[frozenset[str]] = frozenset()
    READS: ClassVar[tuple[int, ...]] = (1,)

    version: int = 1

    def to_bytes(self) -> bytes:
        """Serialise, with the self-hash in ``check``."""
        body = {name: value for name, value in vars(self).items() if value or name not in self.ADDED}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)
        return f'{text[:-1]},"check":"{digest(text.encode())}"}}\n'.encode()

    def publish(self, path: str, *, sync: bool) -> None:
        """Write the manifest by rename; do this after everything it describes."""
        fsio.write_atomic(path, self.to_bytes(), mode=0o600 if not sync else 0o644, sync=sync)

    @classmethod
    def load(cls, path: str) -> Self:
        """Read and check a manifest.

        Raises:
            FileNotFoundError: There is none.
            DataError: Torn, edited, of another version, or not a manifest of this kind.
        """
        return cls.from_bytes(fsio.read_bytes(path), where=path)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Self:
        """Read and check a manifest that was sent; ``where`` names it in errors.

        Raises:
            DataError: As for :meth:`load`.
        """
        with garbage.kept():
            try:
                raw = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not valid JSON: {error}", path=where) from error
            return cls._check(raw, where, data)

    @classmethod
    def _check(cls, raw: Any, path: str, data: bytes) -> Self:
        if not isinstance(raw, dict) or "check" not in raw:
            raise DataError(f"{path} is not a manifest", path=path)
        check = raw.pop("check")
        if not (_sound_as_written(data, check) or _sound(raw, check)):
            raise DataError(f"{path} does not match its own hash", path=path)
        if raw.get("version") not in cls.READS:
            *older, newest = map(str, cls.READS)
            known = f"{', '.join(older)} and {newest}" if older else newest
            raise DataError(
                f"{path} has version {raw.get('version')}, this program reads {known}",
                mend="use the version of slurm-resil that wrote it, or a newer one",
                path=path,
            )
        names = {entry.name for entry in fields(cls)}
        odd = sorted((set(raw) ^ names) - (cls.ADDED - set(raw)))
        if odd:
            raise DataError(f"{path} is not a {cls.__name__}: {', '.join(odd)}", path=path)
        try:
            return cls._from_raw(raw)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise DataError(f"{path} is not a {cls.__name__}: {error}", path=path) from error

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Self:
        raise DataError(f"{cls.__name__} cannot be read")  # every concrete manifest has its own


def _plain(entry: object) -> dict[str, Any]:
    raw = vars(entry)
    if isinstance(entry, Item) and not entry.blocks:
        raw = raw.copy()
        for name in _OF_BLOCKS:
            del raw[name]
    return raw


def _sound_as_written(data: bytes, check: object) -> bool:
    """Whether bytes are as ``to_bytes`` writes them and match their hash: the usual case, and the fast one."""
    if not (isinstance(check, str) and check.isascii()):
        return False
    tail = f',"check":"{check}"}}\n'.encode()
    if not data.endswith(tail):
        return False
    state = xxhash.xxh3_128(memoryview(data)[: -len(tail)])
    state.update(b"}")
    return state.hexdigest() == check


def _sound(raw: dict[str, Any], check: object) -> bool:
    """Whether a document matches its hash, however it is laid out: a tool may have indented it."""
    try:
        text = json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        return False  # a number that no manifest has
    return digest(text.encode()) == check


def read_item(raw: dict[str, Any]) -> Item:
    """Make an item of its JSON.

    Raises:
        ValueError: Its blocks are not those of its bytes, or not those of its hash.
    """
    if "blocks" in raw:
        raw = {**raw, "blocks": tuple(raw["blocks"])}
        nbytes, size, blocks = raw["nbytes"], raw["block_bytes"], raw["blocks"]
        if not (0 < size < nbytes and len(blocks) == -(-nbytes // size)):
            raise ValueError(f"{raw['name']} has {len(blocks)} blocks of {size} bytes for {nbytes} bytes")
        if digest_of_blocks(blocks) != raw["xxh3"]:
            raise ValueError(f"the hash of {raw['name']} is not that of its blocks")
    extents = tuple(
        Extent(local=tuple(e["local"]), start=tuple(e["start"]), shape=tuple(e["shape"])) for e in raw["extents"]
    )
    return Item(
        **{
            **raw,
            "shape": tuple(raw["shape"]),
            "global_shape": tuple(raw["global_shape"]),
            "extents": extents,
        }
    )


@dataclass(frozen=True, kw_only=True)
class ShardManifest(Document):
    """One rank's part of a checkpoint in a slot of the burst buffer.

    Attributes:
        slot: Name of the slot file inside ``slots/``.
        generation: Stamp of the slot's contents; another stamp in the slot means that it was overwritten.
        values: Plain values of the state and its structure, JSON (see ckpt.state).
        costs_s: Measured times by name (``copy``, ``seal``), seconds.
        frame: Hash of what is around the items, see :mod:`slurm_resil.format.frame`, filled in by the seal.
        metrics: What the training said of this state, by name; finite numbers.
    """

    ADDED = frozenset({"frame", "metrics"})
    READS = (1, 2)

    version: int = 2
    run_id: str
    job_id: int
    attempt: int
    iteration: int
    rank: int
    world_size: int
    node: str
    slot: str
    generation: int
    items: tuple[Item, ...]
    values: Any
    created_s: float = 0.0
    costs_s: dict[str, float] = field(default_factory=dict)
    frame: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self.items)

    @property
    def where(self) -> str:
        """Whose it is, in words for errors."""
        return f"rank {self.rank} on {self.node}"

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Self:
        return cls(**{**raw, "items": tuple(read_item(entry) for entry in raw["items"])})


@dataclass(frozen=True, kw_only=True)
class DrainedItem:
    """One dataset of a drained file.

    Attributes:
        name: As in :class:`Item`; the values of a rank have the name ``values`` and the dtype ``json``.
        rank: Rank that owns it (dataset below ``/ranks/<rank>/``), or None for a global tensor (below ``/state/``).
        offset: Where its bytes start in the file; None for an empty one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int | None
    nbytes: int
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class DrainedManifest(Document):
    """A checkpoint in one HDF5 file on the parallel file system.

    Attributes:
        file: Name of the HDF5 file, beside the manifest.
        file_bytes: Its size.
        block_bytes: Size of a hashed block; the last one may be shorter.
        blocks: xxh3 of every block of the file, metadata included, read back from the file.
        written_bytes: Bytes written by each mover rank, as a record that nobody gathered.
        metrics: As in the shards; of several ranks that gave one, the lowest counts.
    """

    ADDED = frozenset({"metrics"})

    run_id: str
    job_id: int
    attempt: int
    iteration: int
    world_size: int
    file: str
    file_bytes: int
    block_bytes: int
    blocks: tuple[str, ...]
    items: tuple[DrainedItem, ...]
    written_bytes: tuple[int, ...] = ()
    created_s: float = 0.0
    costs_s: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Self:
        items = tuple(DrainedItem(**{**entry, "shape": tuple(entry["shape"])}) for entry in raw["items"])
        blocks, written = tuple(raw["blocks"]), tuple(raw["written_bytes"])
        return cls(**{**raw, "items": items, "blocks": blocks, "written_bytes": written})
