"""What a tensor is beyond its numbers, for when it has to be made anew: its class, and the storage that it shares.

What is restored in place has all this already. A tensor that is handed to ``load_state_dict()`` of an object, or is in
a list that has grown, is new; views of one storage are views of one storage then as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slurm_resil.ckpt import plain
from slurm_resil.ckpt.plain import Path, where
from slurm_resil.core.errors import StateError

_PARAMETER = plain.class_name(nn.Parameter)
_ALIGNMENT_BYTES = 16  # the largest element: a view of any type begins at a multiple of its own


def ordinary(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are tensors of no special class, without gradients, each with a storage of its own."""
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
        return True  # it will be refused
    simple = all(type(tensor) is torch.Tensor and not tensor.requires_grad for tensor in tensors)
    return simple and len({tensor.untyped_storage()._cdata for tensor in tensors}) == len({id(t) for t in tensors})


def describe(tensor: torch.Tensor, node: dict[str, Any], path: Path, *, given: bool) -> None:
    """Add to a node what its tensor is.

    Args:
        tensor: It.
        node: Its node.
        path: Where it is.
        given: ``state_dict()`` of an object gave it: it will be made anew for certain.

    Raises:
        StateError: Its class adds attributes, which would be lost.
    """
    if tensor.requires_grad:
        node["requires_grad"] = True
    if type(tensor) in (nn.Parameter, DTensor):
        if isinstance(tensor, nn.Parameter):
            node["class"] = _PARAMETER
    elif type(tensor) is not torch.Tensor:
        if given and vars(tensor):
            raise StateError(
                f"{where(path)}: a {plain.class_name(type(tensor))} has attributes of its own, which cannot be stored",
                mend="let state_dict() give an ordinary tensor and plain values",
                state_path=where(path),
            )
        node["class"] = plain.class_name(type(tensor))


def mark(alone: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> None:
    """Add to the nodes of tensors which of them share a storage, and where in it each lies."""
    groups: dict[object, list[tuple[torch.Tensor, dict[str, Any]]]] = {}
    for tensor, node in alone:
        if tensor.numel() and not tensor.is_meta and not tensor.is_conj() and not tensor.is_neg():
            groups.setdefault(tensor.untyped_storage()._cdata, []).append((tensor, node))
    for group in groups.values():
        if len({node["item"] for _, node in group}) > 1:
            spans = [_span(tensor) for tensor, _ in group]
            first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
            first -= first % _ALIGNMENT_BYTES
            for (tensor, node), (start, _) in zip(group, spans, strict=True):
                node["view"] = {
                    "of": group[0][1]["item"],
                    "nbytes": last - first,
                    "offset": start - first,
                    "strides": list(tensor.stride()),
                }


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one behind its last."""
    size = tensor.element_size()
    start = int(tensor.storage_offset())
    last = start + sum((n - 1) * stride for n, stride in zip(tuple(tensor.shape), tensor.stride(), strict=True))
    return start * size, (last + 1) * size


class Storages:
    """Storages that new tensors share."""

    def __init__(self) -> None:
        self._made: dict[str, torch.Tensor] = {}

    def view(self, node: dict[str, Any], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Make the tensor of a node that :func:`mark` has marked; its elements are zero until they are filled."""
        place = node["view"]
        if place["of"] not in self._made:
            self._made[place["of"]] = torch.zeros(place["nbytes"], dtype=torch.uint8, device=device)
        made = torch.empty(0, dtype=dtype, device=device)
        storage = self._made[place["of"]].untyped_storage()
        start = place["offset"] // made.element_size()
        return made.set_(storage, start, tuple(node.get("expanded", node["shape"])), tuple(place["strides"]))


def dressed(tensor: torch.Tensor, node: dict[str, Any], path: Path) -> torch.Tensor:
    """Make of a new tensor what the one of a node was; the same memory.

    Raises:
        StateError: Its class is not there.
    """
    name, grad = node.get("class"), bool(node.get("requires_grad"))
    if "expanded" in node:
        tensor = tensor.expand(tuple(node["expanded"]))
    if name == _PARAMETER:
        return nn.Parameter(tensor, requires_grad=grad)
    if name is not None:
        class_ = plain.find_class(name, path)
        if not issubclass(class_, torch.Tensor):
            raise StateError(f"{where(path)}: {name} is no class of tensors now", state_path=where(path))
        tensor = tensor.as_subclass(class_)
    return tensor.detach().requires_grad_() if grad else tensor
