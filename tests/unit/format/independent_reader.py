"""Reads checkpoints with h5py, numpy and xxhash alone, by FORMAT.md: nothing of the package is imported here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from xxhash import xxh3_128_hexdigest


def array(path: Path, dataset: Any) -> Any:
    """The bytes at the dataset's offset, with its type."""
    dtype = json.loads(dataset.attrs["dtype"])
    count = dataset.id.get_storage_size()
    offset = dataset.id.get_offset() if count else 0
    raw = np.fromfile(path, np.uint8, count, offset=offset)
    kind, _, name = dtype.partition(".")
    if dtype == "torch.bfloat16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4").reshape(dataset.shape)
    if kind == "numpy":
        return raw.view(np.dtype(name)).reshape(dataset.shape)
    if kind == "torch":
        return raw.view(np.dtype(name)).reshape(dataset.shape)
    return raw.tobytes()


def tree(node: Any, item: Any) -> Any:
    """What a node of the values stands for; containers become dicts and lists."""
    if isinstance(node, list):
        return [tree(value, item) for value in node]
    if not isinstance(node, dict):
        return node
    kind = node["$"]
    if "item" in node:
        return item(node["item"])
    if kind == "optimizer":
        state = {name: {key: tree(value, item) for key, value in pairs} for name, pairs in node["state"]}
        return {"state": state, "groups": [{key: tree(v, item) for key, v in group["of"]} for group in node["groups"]]}
    if kind in ("dict", "OrderedDict", "module", "dataclass", "namespace"):
        return {key if isinstance(key, str) else str(key): tree(value, item) for key, value in node["of"]}
    return tree(node["of"], item) if "of" in node else node


def drained(path: Path, rank: int) -> Any:
    """State of one rank of a drained checkpoint."""
    with h5py.File(path, "r") as file:
        values = json.loads(array(path, file[f"ranks/{rank}/values"]))

        def item(name: str) -> Any:
            own = f"ranks/{rank}/{name}"
            return array(path, file[own if own in file else f"state/{name}"])

        return tree(values, item)


def verify(path: Path, item: Any) -> None:
    """Compare the bytes of a shard's item with its hashes."""
    raw = np.fromfile(path, np.uint8, item["nbytes"], offset=item["offset"] or 0)
    size = item.get("block_bytes", 0)
    blocks = [xxh3_128_hexdigest(raw[at : at + size]) for at in range(0, len(raw), size)] if size else []
    assert blocks == item.get("blocks", []), item["name"]
    assert xxh3_128_hexdigest(bytes.fromhex("".join(blocks)) if size else raw) == item["xxh3"], item["name"]


def shard(job_dir: Path, iteration: int, rank: int) -> Any:
    """State in a sealed slot."""
    manifest = json.loads((job_dir / "manifests" / f"{iteration:010d}-{rank:06d}.json").read_text())
    path = job_dir / "slots" / manifest["slot"]
    for entry in manifest["items"]:
        verify(path, entry)
    with h5py.File(path, "r") as file:
        return tree(manifest["values"], lambda name: array(path, file[f"state/{name}"]))
