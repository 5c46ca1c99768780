"""Messages on the wire: JSON objects that say what they are, with every field checked."""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any, Literal

from slurm_resil.core.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Message:
    """Anything that is said."""


@functools.cache
def _types() -> dict[str, tuple[type[Message], dict[str, Any]]]:
    """All messages with their fields; by the first message all are defined."""
    return {kind.__name__: (kind, typing.get_type_hints(kind)) for kind in Message.__subclasses__()}


def to_wire(message: Message) -> dict[str, Any]:
    """Put a message into a JSON object."""
    return {"t": type(message).__name__, **dataclasses.asdict(message)}


def from_wire(raw: dict[str, Any]) -> Message:
    """Read a message.

    Raises:
        DataError: It is none, or a field is missing, unknown or of another type.
    """
    known = _types().get(str(raw.get("t")))
    if known is None:
        raise DataError(f"{str(raw.get('t'))[:40]!r} is no message")
    given = {name: value for name, value in raw.items() if name != "t"}
    kind, hints = known
    for name, value in given.items():
        if name not in hints or not _fits(value, hints[name]):
            raise DataError(f"{kind.__name__}.{name[:40]} cannot be {str(value)[:80]!r}")
    try:
        return kind(**given)
    except TypeError as error:
        raise DataError(f"{kind.__name__}: {error}") from error


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(entry, arguments[0]) for entry in value)
    if origin is tuple:
        return isinstance(value, list | tuple) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, arguments[0]) and _fits(entry, arguments[1]) for key, entry in value.items()
        )
    if arguments:  # a union
        return any(_fits(value, choice) for choice in arguments)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
