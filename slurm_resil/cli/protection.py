"""What protection a job gets on some nodes, for whoever asks before there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from slurm_resil.core.errors import ServiceError
from slurm_resil.slurm.job import nodes_of

F = TypeVar("F", bound=Callable[..., Any])


def _nodes(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    try:
        nodes = nodes_of(text)
    except ServiceError as error:
        raise click.BadParameter(f"{error.message}, as in node[1-8]") from error
    if not nodes:
        raise click.BadParameter(f"{text!r} names no node, as in node[1-8]")
    return nodes


def nodes_option(words: str) -> Callable[[F], F]:
    """Option ``--nodes``, a list as Slurm writes it; ``words`` are its help."""
    return click.option("--nodes", metavar="NODELIST", callback=_nodes, help=words)
