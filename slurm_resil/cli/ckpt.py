"""``slurm-resil ckpt``: what there is on all tiers, whether it is sound, and draining by hand."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from slurm_resil.agent.place import from_env
from slurm_resil.catalog import RunCatalog
from slurm_resil.cli.export import export
from slurm_resil.cli.places import as_json_option, names, places, resolve
from slurm_resil.cli.prune import keep, prune, retention
from slurm_resil.cli.tensor import VALUES
from slurm_resil.cli.tensor import show as show_tensor
from slurm_resil.core import errors, paths
from slurm_resil.core.errors import DataError, UsageError
from slurm_resil.core.model import CheckpointState
from slurm_resil.core.retention import Checkpoint, judge
from slurm_resil.drain import check, find, shards
from slurm_resil.format.manifest import DrainedManifest, ShardManifest
from slurm_resil.launch.commands import clean


@dataclass(kw_only=True)
class Seen:
    """One iteration, as seen from this node.

    Attributes:
        iteration: Which.
        ranks: Ranks with a sound manifest in this node's burst buffer.
        world_size: Number of ranks of the checkpoint; 0 if nothing says it.
        nbytes: Size of this node's shards.
        marked: Whether the burst buffer says that it is durable.
        drained: Published manifest on the parallel file system.
        created_s: When it was sealed or published, Unix seconds.
        metrics: What the training said of it.
        kept: Why the retention keeps the drained file; empty if it goes with the next deletion.
        faults: What is wrong with it.
    """

    iteration: int
    ranks: list[int] = field(default_factory=list)
    world_size: int = 0
    nbytes: int = 0
    marked: bool = False
    drained: DrainedManifest | None = None
    created_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    faults: list[str] = field(default_factory=list)

    @property
    def state(self) -> CheckpointState:
        """State in the catalog's words; LOCAL says that shards are here, other nodes are not asked."""
        if self.drained is not None:
            return CheckpointState.DURABLE
        return CheckpointState.LOCAL if self.ranks else CheckpointState.LOST

    def row(self) -> dict[str, object]:
        """Plain form."""
        return {
            "iteration": self.iteration,
            "state": self.state.value,
            "local_ranks": self.ranks,
            "world_size": self.world_size,
            "local_bytes": self.nbytes,
            "marked_durable": self.marked,
            "file": self.drained.file if self.drained else None,
            "file_bytes": self.drained.file_bytes if self.drained else None,
            "created_s": self.created_s,
            "metrics": dict(self.metrics),
            "kept": list(self.kept),
            "faults": self.faults,
        }


def look(run_dir: str | None, job_dir: str | None) -> list[Seen]:
    """Everything on both tiers, newest first. Either directory may be missing."""
    seen: dict[int, Seen] = {}

    def at(iteration: int) -> Seen:
        return seen.setdefault(iteration, Seen(iteration=iteration))

    if job_dir:
        for iteration in shards.listed(job_dir):
            good, bad = shards.load(job_dir, iteration)
            entry = at(iteration)
            entry.faults += bad
            entry.ranks = [one.rank for one in good]
            entry.nbytes = sum(one.nbytes for one in good)
            entry.world_size = max((one.world_size for one in good), default=0)
            entry.created_s = max((one.created_s for one in good), default=0.0)
            for one in sorted(good, key=lambda one: -one.rank):
                entry.metrics = {**entry.metrics, **one.metrics}
        for name in names(os.path.join(job_dir, "durable")):
            marked = paths.parse_durable(name)
            if marked is not None:
                at(marked).marked = True
    if run_dir:
        for name in names(run_dir):
            published = paths.parse_drained(name)
            if published is not None:
                _published(at(published), run_dir)
            elif name.startswith("ckpt-") and name.endswith(".bad") and name[5:-4].isdigit():
                at(int(name[5:-4])).faults.append(f"{os.path.join(run_dir, name)}: did not verify when it was restored")
        _judge([entry for entry in seen.values() if entry.drained is not None], run_dir)
    return [seen[iteration] for iteration in sorted(seen, reverse=True)]


def _published(entry: Seen, run_dir: str) -> None:
    entry.drained = find.durable(run_dir, entry.iteration)
    if entry.drained is None:
        entry.faults.append(_why(run_dir, entry.iteration))
    else:
        entry.world_size, entry.created_s = entry.drained.world_size, entry.drained.created_s
        entry.metrics = entry.drained.metrics


def _judge(entries: list[Seen], run_dir: str) -> None:
    """Say of drained checkpoints why they stay, by the rules of the environment."""
    found = []
    for entry in entries:
        by_hand = os.path.lexists(paths.drained_kept(run_dir, entry.iteration))
        one = Checkpoint(iteration=entry.iteration, created_s=entry.created_s, metrics=entry.metrics, by_hand=by_hand)
        found.append(one)
    why = judge(found, retention(os.environ))
    for entry in entries:
        entry.kept = why[entry.iteration]


def _why(run_dir: str, iteration: int) -> str:
    try:
        RunCatalog(run_dir).load(iteration)
    except (DataError, OSError) as error:
        return str(error)
    return f"{paths.drained_manifest(run_dir, iteration)} or its file was damaged a moment ago"


@click.group()
def ckpt() -> None:
    """Look at checkpoints in this node's burst buffer and on the parallel file system; verify, drain, delete them."""


ckpt.add_command(prune)
ckpt.add_command(keep)
ckpt.add_command(export)


@ckpt.command("ls")
@places
@as_json_option
def ls(run_dir: str | None, job_dir: str | None, as_json: bool) -> None:
    """List checkpoints, newest first."""
    run_dir, job_dir = resolve(run_dir, job_dir)
    rows = [entry.row() for entry in look(run_dir, job_dir)]
    if as_json:
        click.echo(json.dumps({"run_dir": run_dir, "job_dir": job_dir, "checkpoints": rows}))
        return
    if not rows:
        click.echo(f"no checkpoint in {' or '.join(filter(None, (run_dir, job_dir)))}")
        return
    _table(
        ("iteration", "state", "ranks here", "bytes here", "file", "age", "metrics", "kept", "faults"),
        [
            (
                str(row["iteration"]),
                str(row["state"]),
                f"{len(row['local_ranks'])} of {row['world_size']}" if isinstance(row["local_ranks"], list) else "",
                _size(row["local_bytes"]),
                f"{row['file']} ({_size(row['file_bytes'])})" if row["file"] else "-",
                _age(row["created_s"]),
                _metrics(row["metrics"]),
                _kept(row),
                "; ".join(row["faults"]) if isinstance(row["faults"], list) else "",
            )
            for row in rows
        ],
    )


@ckpt.command()
@click.argument("iteration", type=click.IntRange(min=0))
@places
@click.option("--tensor", metavar="NAME", help="Show this one: statistics and values, read from verified bytes.")
@click.option("--rank", type=click.IntRange(min=0), help="Whose, where several ranks have one of that name.")
@click.option("--slice", "part", default="", metavar="SLICE", help="A part of it, as in 0:2,:,5.")
@click.option("--values", type=click.IntRange(min=0), default=VALUES, show_default=True, help="How many are shown.")
@click.option("--local", is_flag=True, help="Of this node's shards, though there is a drained file.")
@as_json_option
def show(
    iteration: int,
    run_dir: str | None,
    job_dir: str | None,
    tensor: str | None,
    rank: int | None,
    part: str,
    values: int,
    local: bool,
    as_json: bool,
) -> None:
    """Show the items of one checkpoint: of the drained file if there is one, else of this node's shards."""
    run_dir, job_dir = resolve(run_dir, job_dir)
    entry = next((one for one in look(run_dir, job_dir) if one.iteration == iteration), None)
    if entry is None:
        raise UsageError(
            f"there is no checkpoint of iteration {iteration} here", mend="look with `slurm-resil ckpt ls`"
        )
    if local:
        entry.drained = None
    if tensor is not None:
        held = shards.load(job_dir, iteration)[0] if job_dir and entry.drained is None else []
        show_tensor(
            name=tensor,
            rank=rank,
            part=part,
            keep=values,
            as_json=as_json,
            run_dir=run_dir,
            drained=entry.drained,
            job_dir=job_dir,
            shards=held,
        )
        return
    items = _items(entry, job_dir)
    costs: Mapping[str, float] = entry.drained.costs_s if entry.drained else {}
    written = list(entry.drained.written_bytes) if entry.drained else []
    if as_json:
        click.echo(json.dumps({**entry.row(), "items": items, "costs_s": costs, "written_bytes": written}))
        return
    for name, value in {**entry.row(), "costs_s": dict(costs), "written_bytes": written}.items():
        click.echo(f"{name:<15} {value}")
    _table(
        ("rank", "name", "type", "shape", "bytes"),
        [
            (
                "all" if item["rank"] is None else str(item["rank"]),
                str(item["name"]),
                str(item["dtype"]),
                str(item["shape"]),
                _size(item["nbytes"]),
            )
            for item in items
        ],
    )


def _items(entry: Seen, job_dir: str | None) -> list[dict[str, object]]:
    names = ("name", "dtype", "shape", "nbytes")
    if entry.drained is not None:
        return [{**{n: getattr(item, n) for n in names}, "rank": item.rank} for item in entry.drained.items]
    manifests: list[ShardManifest] = shards.load(job_dir, entry.iteration)[0] if job_dir else []
    return [{**{n: getattr(i, n) for n in names}, "rank": one.rank} for one in manifests for i in one.items]


@ckpt.command()
@click.argument("iterations", type=click.IntRange(min=0), nargs=-1)
@places
@as_json_option
def verify(iterations: tuple[int, ...], run_dir: str | None, job_dir: str | None, as_json: bool) -> None:
    """Read checkpoints in full and compare every hash; all of them if none is named. Ends with 65 if one is damaged."""
    run_dir, job_dir = resolve(run_dir, job_dir)
    entries = look(run_dir, job_dir)
    unknown = set(iterations) - {entry.iteration for entry in entries}
    if unknown:
        raise UsageError(
            f"there is no checkpoint of iteration {min(unknown)} here", mend="look with `slurm-resil ckpt ls`"
        )
    chosen = [entry for entry in entries if not iterations or entry.iteration in iterations]
    total = sum(entry.nbytes + (entry.drained.file_bytes if entry.drained else 0) for entry in chosen)
    results: list[dict[str, Any]] = []
    with _progress(total, show=not as_json) as done:
        for entry in chosen:
            flaws = list(entry.faults)
            if entry.ranks and job_dir:
                flaws += check.shard_flaws(job_dir, entry.iteration, done)
            if entry.drained is not None:
                flaws += check.drained_flaws(run_dir, entry.iteration, done)
            results.append(
                {
                    "iteration": entry.iteration,
                    "sound": not flaws,
                    "local_ranks": entry.ranks,
                    "file": entry.drained.file if entry.drained else None,
                    "flaws": list(dict.fromkeys(flaws)),
                }
            )
    if as_json:
        click.echo(json.dumps({"run_dir": run_dir, "job_dir": job_dir, "checkpoints": results}))
    for result in results if not as_json else ():
        tiers = [f"ranks {result['local_ranks']} here"] if result["local_ranks"] else []
        tiers += [str(result["file"])] if result["file"] else []
        click.echo(
            f"{result['iteration']}: {'sound' if result['sound'] else 'DAMAGED'} ({', '.join(tiers) or 'nothing'})"
        )
        for flaw in result["flaws"]:
            click.echo(f"    {flaw}")
    bad = [str(result["iteration"]) for result in results if not result["sound"]]
    if bad:
        words = f"damaged: iteration {', '.join(bad)}"
        damaged = DataError(words, mend="another tier or an earlier iteration may be sound")
        damaged.told = as_json
        raise damaged


@ckpt.command()
@click.argument("iteration", default="newest")
@places
@click.option("--cap", type=click.FloatRange(min=1), help="Limit of all movers together, bytes/s.")
@click.option("--prune", "prunes", is_flag=True, help="Then delete what the retention settings do not keep.")
@as_json_option
def drain(
    iteration: str, run_dir: str | None, job_dir: str | None, cap: float | None, prunes: bool, as_json: bool
) -> None:
    """Drain a checkpoint now: over all nodes of the job when run inside one, else of this node alone."""
    place = from_env(os.environ)
    argv = [sys.executable, "-m", "slurm_resil", "mover", "drain", "--run-dir", run_dir or place.run_dir]
    argv += ["--job-dir", job_dir or place.job_dir, "--iteration", iteration]
    argv += ["--cap", str(cap)] if cap else []
    argv += ["--prune"] if prunes else []
    argv += ["--json"] if as_json else []
    if place.info.nodes > 1:
        srun = shutil.which("srun")
        if srun is None:
            raise errors.ConfigError("srun is not found", mend="run this inside the job")
        shape = [f"--nodes={place.info.nodes}", f"--ntasks={place.info.nodes}", "--ntasks-per-node=1"]
        argv = [srun, "--overlap", *shape, "--mpi=pmi2", "--cpu-bind=none", "--input=none", "--gres=none", *argv]
    sys.stdout.flush()
    os.execve(argv[0], argv, clean(os.environ, keep_gpus=False))  # noqa: S606 - argv is a list of ours


@contextlib.contextmanager
def _progress(total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere; yields what takes bytes."""
    if not (show and sys.stdout.isatty()):
        yield lambda _: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("verify", total=total)
        yield lambda nbytes: bar.update(task, advance=nbytes)


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*heads)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    for row in (heads, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _size(value: object) -> str:
    size = float(value) if isinstance(value, int) else 0.0
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _metrics(value: object) -> str:
    return " ".join(f"{name}={number:g}" for name, number in value.items()) if isinstance(value, dict) else ""


def _kept(row: Mapping[str, object]) -> str:
    """Why the drained file stays; nothing where there is none, or where there are no rules."""
    words = row["kept"] if isinstance(row["kept"], list) else []
    if not row["file"]:
        return ""
    return ", ".join(map(str, words)) if words else "goes with the next deletion"


def _age(value: object) -> str:
    if not isinstance(value, float) or value <= 0:
        return "-"
    seconds = max(0, int(time.time() - value))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
