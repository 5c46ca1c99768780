"""What commands print: tables, sizes, ages and progress; by rich on a terminal, plain elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

WIDEST = 80  # characters to which cells are padded


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(*heads)
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        Console().print(table)
        return
    # one name of a thousand characters is not to make a thousand of every line
    widths = [min(max(len(row[i]) for row in (heads, *rows)), WIDEST) for i in range(len(heads))]
    for row in (heads, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


class Bar:
    """A progress bar, or nothing where there is no terminal."""

    def __init__(self, drawn: Any, task: Any) -> None:
        self._drawn, self._task = drawn, task

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""
        if self._drawn is not None:
            self._drawn.update(self._task, advance=nbytes)

    def set(self, phase: str, done: int, total: int) -> None:
        """So many of so many are done of a phase."""
        if self._drawn is not None:
            self._drawn.update(self._task, description=phase, completed=done, total=total)


@contextlib.contextmanager
def progress(what: str, total: int | None, *, show: bool) -> Iterator[Bar]:
    """A bar on a terminal, nothing elsewhere."""
    if not (show and sys.stdout.isatty()):
        yield Bar(None, None)
        return
    from rich.progress import Progress

    with Progress(transient=True) as drawn:
        yield Bar(drawn, drawn.add_task(what, total=total))


def size(value: object) -> str:
    """Bytes for a person."""
    number = float(value) if isinstance(value, int) else 0.0
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def age(value: object) -> str:
    """How long a time (Unix seconds) is ago, for a person."""
    if not isinstance(value, float) or value <= 0:
        return "-"
    seconds = max(0, int(time.time() - value))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"
