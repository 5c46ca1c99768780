"""Find a checkpoint for torch.distributed.checkpoint, and the names that it has there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from slurm_resil.catalog import RunCatalog
from slurm_resil.ckpt import plain, saved
from slurm_resil.ckpt.options import listed
from slurm_resil.ckpt.planning import kind_of
from slurm_resil.ckpt.saved import Save
from slurm_resil.ckpt.shards import ShardsSource
from slurm_resil.ckpt.source import DrainedSource
from slurm_resil.core import paths
from slurm_resil.core.errors import DataError
from slurm_resil.format import layout
from slurm_resil.format.manifest import Document, DrainedManifest

AnySource = ShardsSource | DrainedSource


@dataclass(frozen=True, kw_only=True)
class Record(Document):
    """What makes a save of torch.distributed.checkpoint complete.

    Attributes:
        name: Name of the save.
        tensors: The planner's names of all tensors; a tensor's item is called by it, see ``format.layout``.
        planner: What the planner needs at a load (``Metadata.planner_data``), as a tree of plain values.
        created_s: Unix time.
    """

    name: str
    tensors: tuple[str, ...]
    planner: Any
    created_s: float

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Record:
        return cls(**{**raw, "tensors": tuple(raw["tensors"])})


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of a checkpoint: the item that holds it, its type and its whole shape."""

    item: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint.

    Attributes:
        name: What it is called, for errors.
        tensors: By the planner's names.
        nodes: All that is no tensor, as trees of plain values.
        planner: ``Metadata.planner_data``.
        open: Opens the source of all items.
    """

    name: str
    tensors: dict[str, Tensor]
    nodes: dict[str, Any]
    planner: Any
    open: Callable[[], AnySource]

    @staticmethod
    def check_again(source: AnySource) -> None:
        """Check that nothing was written while it was read.

        Raises:
            DataError: A slot was.
        """
        if isinstance(source, ShardsSource):
            source.check_again()


def find(path: str, iteration: int | None) -> Found:
    """Find a checkpoint.

    Args:
        path: See :class:`slurm_resil.integrations.dcpread.Reader`.
        iteration: Which one; None: the one saved last.

    Raises:
        DataError: There is none, or it is damaged.
        OSError: The file system failed.
    """
    root, name = os.path.split(path)
    drained = paths.parse_drained(name.removesuffix(".h5") + ".json") if name.endswith(".h5") else None
    if drained is not None:
        return _of_drained(root, RunCatalog(root).load(drained))
    itself = [save for save in saved.found(root) if save.name == name] if os.path.isdir(path) else []
    saves = itself or (saved.found(path) if os.path.isdir(path) else [])
    chosen = [save for save in saves if iteration in (None, save.iteration) and save.complete]
    if chosen:
        return _of_dcp(chosen[0]) if chosen[0].kind == "dcp" else _of_save(chosen[0])
    catalog = RunCatalog(path)
    for one in catalog.durable() if os.path.isdir(path) else []:
        if iteration in (None, one):
            return _of_drained(path, catalog.load(one))
    what = "complete checkpoint" if iteration is None else f"complete checkpoint of iteration {iteration}"
    begun = f"; {len(saves)} were begun and are not complete" if saves else ""
    raise DataError(f"{path} has no {what}{begun}", mend="give the directory that was saved to", fault="missing")


def _of_dcp(save: Save) -> Found:
    record = Record.load(save.record)
    if record.name != save.name:
        raise DataError(f"{save.record} is swapped: it is of {record.name}", fault="swapped")
    manifests = save.manifests()
    nodes: dict[str, Any] = {}
    items: dict[str, Tensor] = {}
    for manifest in manifests:
        nodes.update({plain.decode_key(key, ()): node for key, node in manifest.values["of"]})
        for item in manifest.items:
            if item.sharing == "sharded":
                items[item.name] = Tensor(item=item.name, dtype=item.dtype, shape=item.global_shape)
    lost = [name for name in record.tensors if layout.join(name) not in items]
    if lost:
        raise DataError(f"{save.path}: no shard has {listed(lost)}", fault="torn")
    return Found(
        name=save.name,
        tensors={name: items[layout.join(name)] for name in record.tensors},
        nodes=nodes,
        planner=decoded(record.planner),
        open=lambda: ShardsSource(save.path, manifests, None),
    )


def _of_save(save: Save) -> Found:
    manifests = save.manifests()
    items = {
        item.name: Tensor(item=item.name, dtype=item.dtype, shape=item.global_shape) for item in manifests[0].items
    }
    return _named(save.name, manifests[0].values, items, lambda: ShardsSource(save.path, manifests, 0))


def _of_drained(run_dir: str, manifest: DrainedManifest) -> Found:
    with DrainedSource(run_dir, manifest, 0) as source:
        try:
            values = json.loads(source.values(0))
        except ValueError as error:
            raise DataError(f"the values of rank 0 in {manifest.file} are not JSON: {error}", fault="torn") from error
    items = {
        item.name: Tensor(item=item.name, dtype=item.dtype, shape=item.shape)
        for item in manifest.items
        if item.rank in (None, 0)
    }
    return _named(manifest.file, values, items, lambda: DrainedSource(run_dir, manifest, 0))


@dataclass(frozen=True)
class _Leaf:
    """A node that the planner sees as one value."""

    node: Any


class _List(list[Any]):
    """A list, with the node that it is made of: the planner takes lists of plain values as they are."""

    node: Any


def _named(name: str, values: Any, items: dict[str, Tensor], opener: Callable[[], AnySource]) -> Found:
    """Give a state the names that torch's planner gives it; private items are those of rank 0."""
    flat, planner = flatten_state_dict({str(key): entry for key, entry in _mirror(values, (), items).items()})
    tensors: dict[str, Tensor] = {}
    nodes: dict[str, Any] = {}
    for fqn, value in flat.items():
        if isinstance(value, torch.Tensor):
            tensors[fqn] = value.item_of  # type: ignore[attr-defined] # set by _mirror
        elif isinstance(value, _Leaf | _List):
            nodes[fqn] = value.node
    return Found(name=name, tensors=tensors, nodes=nodes, planner=planner, open=opener)


def _mirror(node: Any, path: plain.Path, items: dict[str, Tensor]) -> Any:
    """What ``state_dict()`` and ``get_state_dict()`` would give of a tree, with placeholders."""
    kind = kind_of(node)
    if kind == "tensor" and "expanded" not in node:
        made = torch.empty(0, device="meta")
        made.item_of = items[node["item"]]  # type: ignore[attr-defined]
        return made
    if kind in ("module", *plain.DICT_KINDS):
        pairs = ((plain.decode_key(key, path), entry) for key, entry in node["of"])
        return {key: _mirror(entry, (*path, key), items) for key, entry in pairs}
    if kind in ("stateful", "sharded"):
        return _mirror(node["of"], path, items)
    if kind == "list":
        made_list = _List(_mirror(entry, (*path, index), items) for index, entry in enumerate(node))
        made_list.node = node
        return made_list
    if kind == "optimizer":
        return {
            "state": {
                _parameter(name): {
                    str(plain.decode_key(key, path)): _mirror(entry, (*path, name), items) for key, entry in pairs
                }
                for name, pairs in node["state"]
            },
            "param_groups": [_group(group, path, items) for group in node["groups"]],
        }
    return _Leaf(node)


def _group(group: Any, path: plain.Path, items: dict[str, Tensor]) -> dict[str, Any]:
    names = _List([_parameter(name) for name in group["params"]])
    names.node = list(names)
    made = {str(plain.decode_key(key, path)): _mirror(entry, path, items) for key, entry in group["of"]}
    return {**made, "params": names}


def _parameter(name: str) -> str:
    """Name of a parameter in its module: the last part of its path in the state."""
    return name.rpartition("/")[2]


def encoded(value: object, path: plain.Path) -> Any:
    """Encode plain values for a record.

    Raises:
        StateError: It holds something else; names the path.
    """
    return plain.encode(value, path, encoded)


def decoded(node: Any, path: plain.Path = ("planner_data",)) -> Any:
    """Rebuild what :func:`encoded` took apart."""
    return plain.decode(node, path, decoded)
