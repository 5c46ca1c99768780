from __future__ import annotations

import json
import typing
from typing import Any

import pytest

from slurm_resil.agent import protocol as p
from slurm_resil.core.errors import DataError


def sample(hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return arguments[0]
    if origin is list:
        return [sample(arguments[0])]
    if origin is tuple:
        return tuple(sample(one) for one in arguments)
    if origin is dict:
        return {sample(arguments[0]): sample(arguments[1])}
    if arguments:
        return sample(arguments[0])
    return {int: 3, float: 0.5, str: "x", bool: True}[hint]


@pytest.mark.parametrize("kind", p.Message.__subclasses__())
def test_every_message_survives_the_wire(kind: type[p.Message]) -> None:
    message = kind(**{name: sample(hint) for name, hint in typing.get_type_hints(kind).items()})
    again = p.from_wire(json.loads(json.dumps(p.to_wire(message))))
    assert type(again) is kind
    assert p.to_wire(again) == json.loads(json.dumps(p.to_wire(message)))


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"t": "Message"},
        {"t": "__class__"},
        {"t": "Vote", "epoch": 1, "yes": True},
        {"t": "Vote", "epoch": True, "yes": True, "newest": 1},
        {"t": "Vote", "epoch": 1, "yes": 1, "newest": 1},
        {"t": "Vote", "epoch": "1", "yes": True, "newest": 1},
        {"t": "Vote", "epoch": 1, "yes": True, "newest": 1, "more": 2},
        {"t": "Survey", "cycle": 0, "shards": [[1, 2]]},
        {"t": "Survey", "cycle": 0, "shards": [[1, "2", 0]]},
        {"t": "Loaded", "plan": 1, "rank": 0, "outcome": "perhaps"},
        {"t": "Sealed", "iteration": 1, "rank": 0, "cycle": 0, "costs_s": {"copy": "long"}},
    ],
)
def test_anything_else_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        p.from_wire(raw)
