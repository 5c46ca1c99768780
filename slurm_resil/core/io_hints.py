"""MPI-IO hints as people write them: ``striping_factor=8,romio_cb_write=enable``, and which values can be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from slurm_resil.core.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NEXT = re.compile(r",(?=\s*[A-Za-z0-9_.-]+\s*=)")  # a value may hold commas
_MOST_BYTES = 1024  # of a value
_NUMBERS = (
    "cb_nodes",
    "cb_buffer_size",
    "ind_rd_buffer_size",
    "ind_wr_buffer_size",
    "striping_factor",
    "striping_unit",
)
_ALL = ("striping_factor",)  # -1: as many as there are
_SWITCHES = ("romio_cb_read", "romio_cb_write", "romio_ds_read", "romio_ds_write")
_SETTINGS = ("enable", "disable", "automatic")
_MEND = "as in striping_factor=8,romio_cb_write=enable"


def fault(name: str, value: str) -> str:
    """What is wrong with a hint; empty if nothing is. A name that is not known is left to the MPI library."""
    if not _NAME.fullmatch(name):
        return f"{name!r} is no name of a hint"
    if not value or len(value.encode()) > _MOST_BYTES or not value.isprintable():
        return f"the hint {name} needs a text or a whole number"
    if name in _SWITCHES and value not in _SETTINGS:
        return f"the hint {name} is {value!r}, one of {', '.join(_SETTINGS)} is needed"
    number = value.isascii() and value.isdigit() and int(value[:20]) > 0
    if name in _NUMBERS and not number and not (name in _ALL and value == "-1"):
        return f"the hint {name} is {value!r}, a whole number from 1 is needed"
    return ""


def parse(text: str) -> Mapping[str, str]:
    """Read a list of hints.

    Raises:
        UsageError: It is none, or a value cannot be.
    """
    found: dict[str, str] = {}
    for entry in _NEXT.split(text):
        name, equals, value = (part.strip() for part in entry.partition("="))
        wrong = fault(name, value) if equals else f"{entry.strip()!r} is not NAME=VALUE"
        if not wrong and name in found:
            wrong = f"the hint {name} is there twice"
        if wrong:
            raise UsageError(f"{text!r}: {wrong}", mend=_MEND)
        found[name] = value
    return MappingProxyType(found)
