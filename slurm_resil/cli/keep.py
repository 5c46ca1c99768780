"""Options that say which checkpoints of a run stay, for every command that has to do with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from slurm_resil.core import retention, units
from slurm_resil.core.errors import UsageError
from slurm_resil.core.settings import KEEP_VARIABLES, MOST, PREFIX

F = TypeVar("F", bound=Callable[..., Any])


def _checked(parse: Callable[[str], object]) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    def check(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
        try:
            if text is not None:
                parse(text)
        except UsageError as error:
            raise click.BadParameter(f"{error.message}; {error.mend}") from error
        return text

    return check


def options(function: F) -> Callable[..., Any]:
    """Add the options to a command; it gets them as ``keep``, variables of :mod:`slurm_resil.core.settings`."""
    last = click.option(
        "--keep-last",
        metavar="N|all",
        callback=_checked(retention.parse_last),
        help="Keep the newest N checkpoints, or all. Default: all, or 1 where another --keep option is given.",
    )
    every = click.option(
        "--keep-every", type=click.IntRange(min=1, max=MOST, max_open=True), help="Keep every N-th iteration, too."
    )
    interval = click.option(
        "--keep-interval",
        metavar="DURATION",
        callback=_checked(units.period_s),
        help="Keep the first of each so long, too, as in 1h.",
    )
    best = click.option(
        "--keep-best",
        metavar="METRIC:min|max[:N]",
        callback=_checked(retention.parse_best),
        help="Keep the best, or the N best, by a metric, too.",
    )

    @functools.wraps(function)
    def called(*arguments: Any, **given: Any) -> Any:
        keep = {
            variable: str(value)
            for variable in KEEP_VARIABLES
            if (value := given.pop(variable.removeprefix(PREFIX).lower())) is not None
        }
        return function(*arguments, keep=keep, **given)

    return last(every(interval(best(called))))


def only(keep: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Environment in which the rules that were given hold, and no others; as it is if none was given."""
    if not keep:
        return dict(env)
    return {name: value for name, value in env.items() if name not in KEEP_VARIABLES} | dict(keep)
