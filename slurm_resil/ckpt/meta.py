"""Tensors of the meta device get memory at a restore and stay the objects that they are.

So tied weights stay tied, and an optimizer or a wrapper that was made of them before goes on with them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slurm_resil.ckpt import plain
from slurm_resil.core.errors import UsageError

_ORDINARY = (torch.Tensor, nn.Parameter, nn.Buffer)


class Making:
    """What gets memory.

    Args:
        device: Where, as ``torch.device`` takes it; None: where the checkpoint's tensors were, or on the host.

    Raises:
        UsageError: There is no such device here.
    """

    def __init__(self, device: str | None) -> None:
        self._device = _checked(device)
        self._wanted: dict[int, tuple[torch.Tensor, str]] = {}
        self._made: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor, stored_on: str) -> str:
        """Note a tensor that needs memory; returns why it cannot have any, or nothing.

        Args:
            tensor: It.
            stored_on: Kind of device that it was saved from.
        """
        if not isinstance(tensor, DTensor) and type(tensor) not in _ORDINARY:
            return f"a {plain.class_name(type(tensor))} on the meta device cannot be given memory"
        if tensor.grad_fn is not None or _held(tensor):
            return "is on the meta device and cannot be given memory: a graph, a hook or a weak reference holds it"
        device = self._device or (stored_on if stored_on == "cpu" or _is_there(stored_on) else "cpu")
        self._wanted.setdefault(id(tensor), (tensor, device))
        return ""

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._wanted

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor will be, once there is memory: itself unless it is one of these."""
        return self._made.get(id(tensor), tensor)

    def allocate(self) -> None:
        """Take the memory; nothing of the state changes."""
        storages: dict[int, Any] = {}
        for key, (tensor, device) in self._wanted.items():
            self._made[key] = new = _with_memory(tensor, device, storages)
            new.__dict__.update(tensor.__dict__)

    def swap(self) -> None:
        """Give it to the tensors."""
        for key, (tensor, _) in self._wanted.items():
            torch.utils.swap_tensors(tensor, self._made.pop(key))  # type: ignore[no-untyped-call]


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or its local part, has no memory."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).is_meta


def _held(tensor: Any) -> bool:
    """Whether anything but Python's own references would see a swap, or lose by it."""
    hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(hooks or weakref.getweakrefcount(tensor) or tensor._use_count() > 1)


def _checked(device: str | None) -> str | None:
    try:
        if device is None or (kind := torch.device(device).type) == "cpu" or _is_there(kind):
            return device
        why = "there is none here"
    except RuntimeError as error:
        why = str(error)
    raise UsageError(f"device={device!r} is no device to restore to: {why:.200}")


def _is_there(kind: str) -> bool:
    module = getattr(torch, kind, None)
    return bool(module is not None and hasattr(module, "is_available") and module.is_available())


def _with_memory(tensor: torch.Tensor, device: str, storages: dict[int, Any]) -> torch.Tensor:
    """A tensor like one of the meta device; those that would share memory there do so here."""
    new: torch.Tensor
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            new = torch.empty_like(tensor, device=tensor.device_mesh.device_type)
        else:
            storage = tensor.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device=device)  # type: ignore[no-untyped-call]
            new = torch.empty(0, dtype=tensor.dtype, device=device)
            new.set_(storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new.requires_grad_(tensor.requires_grad)
