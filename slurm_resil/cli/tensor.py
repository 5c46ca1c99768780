"""``slurm-resil ckpt show --tensor``: one tensor of a checkpoint, its statistics and first values, without torch."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np

from slurm_resil.core.errors import UsageError
from slurm_resil.drain import peek
from slurm_resil.format import layout
from slurm_resil.format.decode import Array
from slurm_resil.format.manifest import DrainedItem, DrainedManifest, Item, ShardManifest

VALUES = 8
TEXT_CHARS = 2000


@dataclass(kw_only=True)
class Statistics:
    """What is known of the elements that were read.

    Attributes:
        count: How many.
        nan: How many are no number.
        infinite: How many are infinite.
        least: Smallest finite one; of complex numbers by magnitude. None if there is none.
        most: Largest.
        total: Sum of the finite ones.
        first: The first values, as they are.
    """

    count: int = 0
    nan: int = 0
    infinite: int = 0
    least: float | int | None = None
    most: float | int | None = None
    total: float = 0.0
    first: list[Any] = field(default_factory=list)

    def add(self, part: Array, keep: int) -> None:
        """Take a part in."""
        self.count += part.size
        if len(self.first) < keep:
            self.first += list(part[: keep - len(self.first)])
        if part.dtype.kind not in "biufc":
            return
        if part.dtype.kind == "c":
            part = np.abs(part)
        if part.dtype.kind == "f":
            finite = np.isfinite(part)
            if not finite.all():
                self.nan += int(np.isnan(part).sum())
                self.infinite += int(np.isinf(part).sum())
                part = part[finite]
        if part.size:
            least, most = part.min().item(), part.max().item()
            self.least = least if self.least is None else min(self.least, least)
            self.most = most if self.most is None else max(self.most, most)
            self.total += float(part.sum(dtype=np.float64))

    def row(self) -> dict[str, object]:
        """Plain form; what is not finite is text, so that it is JSON."""
        numbers = self.count - self.nan - self.infinite
        mean = None if self.least is None else self.total / numbers
        return {
            "count": self.count,
            "nan": self.nan,
            "infinite": self.infinite,
            "min": _plain(self.least),
            "max": _plain(self.most),
            "mean": _plain(mean),
            "values": [_plain(value) for value in self.first],
        }


def _plain(value: object) -> object:
    """A value as JSON has it: complex numbers as pairs, floats that are no number as text."""
    if isinstance(value, np.generic):
        value = value.item() if value.dtype.kind in "biufcSU" else str(value)
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def choose(
    items: Iterable[tuple[int | None, Item | DrainedItem]], name: str, rank: int | None
) -> tuple[int | None, Any]:
    """Find an item by its name and, where several ranks have one, by the rank.

    Returns:
        Its rank, None for one that belongs to all; and the item.

    Raises:
        UsageError: There is none, or more than one.
    """
    known = list(items)
    found = [(owner, item) for owner, item in known if item.name == name and (rank is None or owner in (None, rank))]
    if len(found) == 1:
        return found[0]
    if found:
        own = [one for one in found if rank is not None and one[0] == rank]
        if own:
            return own[0]
        owners = ", ".join(str(owner) for owner, _ in found[:8])
        raise UsageError(f"ranks {owners} each have a {name!r} of their own", mend="say which with --rank")
    whose = "" if rank is None else f" of rank {rank}"
    names = sorted({item.name for _, item in known})
    near = difflib.get_close_matches(name, names, n=4) or [one for one in names if name in one][:4]
    mend = f"is one of these meant: {', '.join(near)}?" if near else "`slurm-resil ckpt show` lists them"
    raise UsageError(f"there is no tensor {name!r}{whose} in this checkpoint", mend=mend)


def show(
    *,
    name: str,
    rank: int | None,
    part: str,
    keep: int,
    as_json: bool,
    run_dir: str,
    drained: DrainedManifest | None,
    job_dir: str | None,
    shards: Sequence[ShardManifest],
) -> None:
    """Print a tensor of a drained file, or of this node's shards if there is none.

    Raises:
        UsageError: There is no such tensor, or the part is none of it.
        DataError: What was read is damaged.
    """
    reading: AbstractContextManager[peek.Read]
    if drained is not None:
        owner, item = choose(((one.rank, one) for one in drained.items), name, rank)
        reading, source = peek.drained(run_dir, drained, item), drained.file
    else:
        owner, item = choose(((one.rank, own) for one in shards for own in one.items), name, rank)
        manifest = next(one for one in shards if one.rank == owner)
        reading, source = peek.local(job_dir or "", manifest, item), f"{manifest.slot} on {manifest.node}"
    chosen = peek.select(part, item.shape)
    text = item.dtype in layout.BYTES_DTYPES
    statistics = Statistics()
    with reading as read:
        for elements in peek.parts(item, chosen.index, read):
            statistics.add(elements, TEXT_CHARS if text else keep)
    about: dict[str, object] = {
        "name": item.name,
        "rank": owner,
        "dtype": item.dtype,
        "shape": list(item.shape),
        "bytes": item.nbytes,
        "source": source,
    }
    if isinstance(item, Item) and item.sharing == "sharded":
        about |= {"global_shape": list(item.global_shape), "extents": [vars(extent) for extent in item.extents]}
    if part:
        about |= {"slice": part, "slice_shape": list(chosen.shape)}
    if text:
        about |= {"text": bytes(bytearray(statistics.first)).decode("utf-8", "backslashreplace")}
    else:
        about |= statistics.row()
    if as_json:
        click.echo(json.dumps(about, default=list))
        return
    if not text:  # in the element's own precision: 0.1, not 0.10000000149011612
        shown = ", ".join(str(value) for value in statistics.first)
        about["values"] = shown + (", ..." if statistics.count > len(statistics.first) else "")
    for key, value in about.items():
        click.echo(f"{key:<12} {value}")
