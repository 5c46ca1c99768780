"""Names of the parts of a module without wrappers, at whatever depth: a checkpoint is the same with and without them.

DistributedDataParallel, DataParallel, torch.compile and activation checkpointing put a module inside one of their own,
whose attribute then stands in each name of the state dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from slurm_resil.ckpt.plain import Path, where
from slurm_resil.core.errors import StateError

_HIDDEN = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and of activation wrappers, and of nobody else
_TRACES = ("module.", "_orig_mod.")  # one of these is in every name that has something to take out


def unwrap(module: nn.Module) -> nn.Module:
    """Take the wrappers off a module itself."""
    while (child := _wraps(module)) is not None:
        inner = module._modules[child]
        assert inner is not None
        module = inner
    return module


def marked(names: Iterable[str]) -> bool:
    """Whether any name may have a part of a wrapper; looking for that costs little, as every save does."""
    text = "\n".join(names)
    return any(trace in text for trace in _TRACES)


def plain_name(module: nn.Module, name: str) -> str:
    """Name of a parameter, buffer or entry of the state dict of a module, without the parts of wrappers.

    Args:
        module: Without wrappers itself.
        name: Name in it; wrappers that take their part out of state dicts themselves may have done so.
    """
    if not marked([name]):
        return name
    kept: list[str] = []
    at: nn.Module | None = module
    for part in name.split("."):
        # a wrapper may be there and have no part in the name: its hook has taken it out
        while at is not None and (child := _wraps(at)) is not None and child != part:
            at = at._modules[child]
        if at is None or _wraps(at) is None:
            kept.append(part)
        at = at._modules.get(part) if at is not None else None
    return ".".join(kept)


def plain_names(module: nn.Module, names: Iterable[str], path: Path) -> Mapping[str, str]:
    """Names of a module as they are, by those without the parts of wrappers, in their order.

    Args:
        module: Without wrappers itself.
        names: Names in it.
        path: Where the module is in the state, for errors.

    Raises:
        StateError: Two would be the same.
    """
    found: dict[str, str] = {}
    for name in names:
        plain = plain_name(module, name)
        if found.setdefault(plain, name) != name:
            raise StateError(
                f"{where(path)}: {found[plain]!r} and {name!r} have the same name, {plain!r}, without wrappers",
                mend="rename one of them in the module",
                state_path=where((*path, plain)),
            )
    return found


def _wraps(module: nn.Module) -> str | None:
    """Attribute of the module inside a wrapper; None if it is none."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    return next((name for name in _HIDDEN if module._modules.get(name) is not None), None)
