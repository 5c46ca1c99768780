"""``slurm-resil ckpt diff``: what changed from one checkpoint to another, and by how much."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
from dataclasses import asdict
from typing import Any

import click

from slurm_resil.cli import sides
from slurm_resil.cli.places import as_json_option, examples, places, resolve
from slurm_resil.cli.table import columns, progress
from slurm_resil.core.errors import ResilError, UsageError
from slurm_resil.drain.compare import Change, Key, Tensor, compare, count
from slurm_resil.format import layout


class DifferenceError(ResilError):
    """Two checkpoints differ by more than was allowed."""


def _chosen(side: sides.Side, only: tuple[str, ...], strip: str, *, plain: bool) -> dict[Key, Tensor]:
    """Tensors by the names that are compared; ``plain``: as other programs name them."""
    names = {name: name for _, name in side.tensors}
    if plain and side.encoded:
        names = layout.plain_names(names)

    def wanted(name: str) -> bool:
        return not only or any(fnmatch.fnmatchcase(n, pattern) for n in (name, names[name]) for pattern in only)

    return {
        (rank, names[name].removeprefix(strip)): tensor for (rank, name), tensor in side.tensors.items() if wanted(name)
    }


def _number(value: float | int | None) -> object:
    """A number as JSON has it; what is not finite is text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _row(change: Change) -> dict[str, Any]:
    row = asdict(change)
    row["max_abs"], row["relative_l2"] = _number(change.max_abs), _number(change.relative_l2)
    return row


@click.command(
    epilog=examples(
        "slurm-resil ckpt diff 5000 6000 --tolerance 0",
        "slurm-resil ckpt diff 5000 hf/model.safetensors --strip model/ --only 'model/*'",
    )
)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@places
@click.option("--only", multiple=True, metavar="PATTERN", help="Only these names, as in 'model/*'; repeatable.")
@click.option("--strip", default="", metavar="PREFIX", help="Take this off the names on both sides, as in model/")
@click.option(
    "--values/--no-values", default=True, show_default=True, help="Also plain values, such as learning rates."
)
@click.option("--all", "everything", is_flag=True, help="List what is the same, too.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="End with 1 if a number differs by more than this, or anything else differs at all; 0: bit by bit values.",
)
@as_json_option
def diff(
    a: str,
    b: str,
    run_dir: str | None,
    job_dir: str | None,
    only: tuple[str, ...],
    strip: str,
    values: bool,
    everything: bool,
    tolerance: float | None,
    as_json: bool,
) -> None:
    """Compare the checkpoints A and B: which tensors came, went, or changed, and by how much.

    Each is an iteration of the run (drained, else this node's shards), a drained file (ckpt-*.h5, its manifest beside
    it), or safetensors (a file, an index, or a directory). Values are compared as numbers: types may differ, NaN equals
    NaN. Memory is bounded. Ends with 0 whatever the difference is, unless --tolerance is given.
    """
    if a.isdecimal() or b.isdecimal():
        run_dir, job_dir = resolve(run_dir, job_dir)
    with contextlib.ExitStack() as stack:
        pair = [sides.opened(text, run_dir, job_dir, stack) for text in (a, b)]
        foreign = not all(side.encoded for side in pair)
        chosen = [_chosen(side, only, strip, plain=foreign) for side in pair]
        if not values or only or any(not any(name == layout.VALUES for _, name in one) for one in chosen):
            # what has no plain values, as an export, has not lost them
            chosen = [{key: tensor for key, tensor in one.items() if key[1] != layout.VALUES} for one in chosen]
        if not any(chosen):
            raise UsageError("no tensor is chosen", mend="`slurm-resil ckpt show` lists the names, as in 'model/*'")
        total = sum(tensor_bytes(tensor) for key, tensor in chosen[0].items() if key in chosen[1])
        with progress("compare", total, show=not as_json) as bar:
            changes = list(compare(chosen[0], chosen[1], bar.add))
    beyond = tolerance is not None and any(change.beyond(tolerance) for change in changes)
    if as_json:
        row = {
            "a": pair[0].title,
            "b": pair[1].title,
            "missing": [side.missing for side in pair],
            "counts": count(changes),
            "tensors": [_row(change) for change in changes if everything or change.what != "same"],
            "tolerance": tolerance,
            "beyond": beyond if tolerance is not None else None,
        }
        click.echo(json.dumps(row))
    else:
        _print(pair, [change for change in changes if everything or change.what != "same"], count(changes))
    if beyond:
        worst = [change.name for change in changes if tolerance is not None and change.beyond(tolerance)]
        more = f" and {len(worst) - 4} more" if len(worst) > 4 else ""
        problem = DifferenceError(f"they differ by more than {tolerance:g}: {', '.join(worst[:4])}{more}")
        problem.told = as_json
        raise problem


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor that will be looked at."""
    return math.prod(tensor.shape) * layout.itemsize(tensor.dtype)


def _print(pair: list[sides.Side], shown: list[Change], counts: dict[str, int]) -> None:
    click.echo(f"A  {pair[0].title}\nB  {pair[1].title}")
    for letter, side in zip("AB", pair, strict=True):
        if side.missing:
            click.echo(f"{letter}  {side.missing}: not compared")
    if shown:
        heads = ("rank", "name", "change", "type", "shape", "differing", "max abs", "rel L2", "NaN", "infinite")
        columns(heads, [_cells(change) for change in shown])
    for change in shown:
        for path, before, after in change.paths:
            click.echo(f"    rank {change.rank}  {path}: {before} -> {after}")
    click.echo(", ".join(f"{number} {kind}" for kind, number in counts.items()))


def _cells(change: Change) -> tuple[str, ...]:
    def both(pair: tuple[object, object]) -> str:
        return str(pair[0] if pair[0] == pair[1] or pair[1] is None else pair[1] if pair[0] is None else "") or (
            f"{pair[0]} -> {pair[1]}"
        )

    part = f" of {change.elements}" if change.compared == change.elements else f" of {change.compared} looked at"
    looked = change.what in ("same", "changed") and not change.paths and "json" not in change.dtypes
    return (
        "all" if change.rank is None else str(change.rank),
        change.name,
        change.what,
        both(change.dtypes),
        both(change.shapes),
        f"{change.differing}{part}" if looked else "",
        "" if change.max_abs is None else f"{change.max_abs:g}",
        "" if change.relative_l2 is None else f"{change.relative_l2:.3g}",
        "" if change.nan == (0, 0) else both(change.nan),
        "" if change.infinite == (0, 0) else both(change.infinite),
    )
