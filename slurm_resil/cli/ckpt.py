"""``slurm-resil ckpt``: what there is on all tiers, whether it is sound, and draining by hand."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence

import click

from slurm_resil.cli import verifying
from slurm_resil.cli.diff import diff
from slurm_resil.cli.export import export
from slurm_resil.cli.imports import import_
from slurm_resil.cli.look import look, read, tidy
from slurm_resil.cli.mover_fetch import fetch
from slurm_resil.cli.moving import iteration_option
from slurm_resil.cli.nodes import LOOK_S, become, run_dir_of, survey, this_node, unseen_lines
from slurm_resil.cli.places import as_json_option, examples, here_option, job_option, places, resolve
from slurm_resil.cli.prune import keep, prune
from slurm_resil.cli.table import age, columns, progress, size
from slurm_resil.cli.tensor import VALUES
from slurm_resil.cli.tensor import show as show_tensor
from slurm_resil.cli.tiers import Seen, nodes_row, together
from slurm_resil.cli.tiers import here as look_here
from slurm_resil.core.errors import UsageError
from slurm_resil.format import sealed
from slurm_resil.format.manifest import ShardManifest


@click.group(epilog=examples("slurm-resil ckpt ls --job 4711"))
def ckpt() -> None:
    """Look at checkpoints in the nodes' burst buffers and on the parallel file system; verify, move, delete them."""


ckpt.add_command(prune)
ckpt.add_command(keep)
ckpt.add_command(export)
ckpt.add_command(import_)
ckpt.add_command(diff)
ckpt.add_command(fetch)


@ckpt.command(
    "ls",
    epilog=examples("slurm-resil ckpt ls --job 4711", "slurm-resil ckpt ls --run-dir /scratch/me/runs/llama-3 --json"),
)
@places
@job_option
@here_option
@click.option("--verify", "verifies", is_flag=True, help="Read all of them in full, and say which are sound.")
@as_json_option
def ls(run_dir: str | None, job_dir: str | None, job_id: int | None, here: bool, verifies: bool, as_json: bool) -> None:
    """List checkpoints, newest first: what the nodes of the run's job hold, and what is on the parallel file system.

    Works from a login node: while the job runs, a small step of yours on each of its nodes tells what is there, and
    what could not be seen is said. WRITING: not all ranks have sealed. LOCAL: they have. PROTECTED: it survives the
    loss of nodes. DRAINING: being written. DURABLE: on the parallel file system, verified. LOST: shards are
    missing. DROPPED: its job ended before it was durable.
    """
    run_dir, job_dir = resolve(run_dir_of(job_id, run_dir), job_dir)
    arguments = verifying.arguments((), deep=False) if verifies else []
    limit_s = None if verifies else LOOK_S
    asked = survey(run_dir, job_dir, os.environ, job_id=job_id, here=here, arguments=arguments, timeout_s=limit_s)
    entries = together(run_dir, asked)
    results: dict[int, verifying.Result] = {}
    if verifies:
        with progress("verify", verifying.total_bytes(entries), show=not as_json) as bar:
            done = verifying.verify(run_dir, asked, entries, deep=False, done=bar.add)
        results = {result.entry.iteration: result for result in done}
    rows = [
        entry.row()
        | ({"sound": results[entry.iteration].sound, "flaws": results[entry.iteration].flaws} if results else {})
        for entry in entries
    ]
    if as_json:
        about = {"run_dir": run_dir, "job_dir": job_dir, "job": asked.job_id}
        seen = {"nodes": nodes_row(asked.views), "unseen": asked.unseen, "not_asked": asked.why}
        click.echo(json.dumps({**about, **seen, "checkpoints": rows}))
    elif not rows:
        click.echo(f"no checkpoint in {' or '.join(dict.fromkeys(filter(None, (run_dir, job_dir))))}")
        _hint(run_dir)
    else:
        _table(entries, results)
    for line in unseen_lines(asked) if not as_json else ():
        click.echo(line)
    if verifies:
        verifying.judge(results.values(), asked, told=as_json)


def _table(entries: Sequence[Seen], results: Mapping[int, verifying.Result]) -> None:
    heads = ["iteration", "state", "ranks", "bytes", "on nodes", "file", "age", "metrics", "kept", "faults"]
    rows = [
        [
            str(entry.iteration),
            f"{entry.state.value}{' (says the launcher)' if entry.said else ''}",
            f"{len(entry.ranks)} of {entry.world_size}",
            size(entry.nbytes),
            entry.where(),
            f"{entry.drained.file} ({size(entry.drained.file_bytes)})" if entry.drained else "-",
            age(entry.created_s),
            " ".join(f"{name}={number:g}" for name, number in entry.metrics.items()),
            (", ".join(entry.kept) or "goes with the next deletion") if entry.drained else "",
            "; ".join(
                filter(None, [*entry.faults, entry.dropped, "what is lost can be rebuilt" if entry.rebuildable else ""])
            ),
        ]
        for entry in entries
    ]
    if results:
        heads.insert(2, "verifies")
        words = {i: verifying.WORDS[result.sound] for i, result in results.items()}
        flaws = {i: "; ".join([*result.flaws, *result.unread]) for i, result in results.items()}
        for row, entry in zip(rows, entries, strict=True):
            row.insert(2, words[entry.iteration])
            row[-1] = flaws[entry.iteration] or row[-1]
    columns(heads, rows)


@ckpt.command("here", hidden=True, epilog=examples("slurm-resil ckpt here --run-dir RUN --job-dir JOB"))
@click.option("--run-dir", required=True)
@click.option("--job-dir", required=True)
@click.option("--verify", "verifies", is_flag=True)
@click.option("--deep", is_flag=True)
@click.option("--iteration", "iterations", type=int, multiple=True)
@click.option("--tidy", "tidies", type=click.Choice(("say", "do")))
def here_command(
    run_dir: str, job_dir: str, verifies: bool, deep: bool, iterations: tuple[int, ...], tidies: str | None
) -> None:
    """What ``ls``, ``verify`` and ``prune`` start on each node: tell what this one holds, for a program."""
    view = look(job_dir, this_node())
    if verifies:
        read(view, iterations, deep=deep)
    if tidies:
        tidy(view, run_dir, yes=tidies == "do")
    for line in view.lines():
        click.echo(line)


def _hint(directory: str) -> None:
    """Say how what async_save or torch.distributed.checkpoint have saved in a directory is looked at."""
    from slurm_resil.ckpt.saved import found  # h5py: not for --help

    saves = found(directory)
    if saves:
        click.echo("there are saves of a program's own, to be looked at one by one:")
    for save in saves:
        click.echo(
            f"  slurm-resil ckpt ls --job-dir {shlex.quote(save.path)}{'' if save.complete else '  (incomplete)'}"
        )


@ckpt.command(
    epilog=examples("slurm-resil ckpt show 500", "slurm-resil ckpt show 500 --tensor model/head.weight --slice 0:2,:")
)
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
    entry = next((one for one in look_here(run_dir, job_dir) if one.iteration == iteration), None)
    if entry is None:
        raise UsageError(
            f"there is no checkpoint of iteration {iteration} here", mend="look with `slurm-resil ckpt ls`"
        )
    if local:
        entry.drained = None
    if tensor is not None:
        held = sealed.load(job_dir, iteration)[0] if job_dir and entry.drained is None else []
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
    columns(
        ("rank", "name", "type", "shape", "bytes"),
        [
            (
                "all" if item["rank"] is None else str(item["rank"]),
                str(item["name"]),
                str(item["dtype"]),
                str(item["shape"]),
                size(item["nbytes"]),
            )
            for item in items
        ],
    )


def _items(entry: Seen, job_dir: str | None) -> list[dict[str, object]]:
    names = ("name", "dtype", "shape", "nbytes")
    if entry.drained is not None:
        return [{**{n: getattr(item, n) for n in names}, "rank": item.rank} for item in entry.drained.items]
    manifests: list[ShardManifest] = sealed.load(job_dir, entry.iteration)[0] if job_dir else []
    return [{**{n: getattr(i, n) for n in names}, "rank": one.rank} for one in manifests for i in one.items]


@ckpt.command(epilog=examples("slurm-resil ckpt verify", "slurm-resil ckpt verify 500 --deep --job 4711"))
@click.argument("iterations", type=click.IntRange(min=0), nargs=-1)
@places
@job_option
@here_option
@click.option(
    "--deep",
    is_flag=True,
    help="Also HDF5's own view of slots and files, shards against what protects them, and files against shards.",
)
@as_json_option
def verify(
    iterations: tuple[int, ...],
    run_dir: str | None,
    job_dir: str | None,
    job_id: int | None,
    here: bool,
    deep: bool,
    as_json: bool,
) -> None:
    """Read checkpoints in full and compare every hash; all of them if none is named.

    Shards and redundancy are read on the nodes that hold them, all at once, drained files where you are. Ends with 65
    if one is damaged, and with 69 if storage or a node does not let one be read, so that nothing is known of it.
    """
    run_dir, job_dir = resolve(run_dir_of(job_id, run_dir), job_dir)
    arguments = verifying.arguments(iterations, deep=deep)
    asked = survey(run_dir, job_dir, os.environ, job_id=job_id, here=here, arguments=arguments, timeout_s=None)
    entries = together(run_dir, asked)
    unknown = set(iterations) - {entry.iteration for entry in entries}
    if unknown:
        raise UsageError(
            f"there is no checkpoint of iteration {min(unknown)} here", mend="look with `slurm-resil ckpt ls`"
        )
    entries = [entry for entry in entries if not iterations or entry.iteration in iterations]
    with progress("verify", verifying.total_bytes(entries), show=not as_json) as bar:
        results = verifying.verify(run_dir, asked, entries, deep=deep, done=bar.add)
    if as_json:
        rows = [result.row(deep=deep) for result in results]
        about = {"run_dir": run_dir, "job_dir": job_dir, "job": asked.job_id}
        seen = {"nodes": nodes_row(asked.views), "unseen": asked.unseen}
        click.echo(json.dumps({**about, **seen, "checkpoints": rows}))
    for result in results if not as_json else ():
        click.echo(result.words())
        for text in (*result.unread, *result.flaws):
            click.echo(f"    {text}")
    for line in unseen_lines(asked) if not as_json else ():
        click.echo(line)
    verifying.judge(results, asked, told=as_json)


@ckpt.command(epilog=examples("slurm-resil ckpt drain --job 4711", "slurm-resil ckpt drain 500 --cap 2e9"))
@click.argument("iteration", default="newest", callback=iteration_option)
@places
@job_option
@click.option("--cap", type=click.FloatRange(min=1), help="Limit of all movers together, bytes/s.")
@click.option("--prune", "prunes", is_flag=True, help="Then delete what the retention settings do not keep.")
@as_json_option
def drain(
    iteration: int | None,
    run_dir: str | None,
    job_dir: str | None,
    job_id: int | None,
    cap: float | None,
    prunes: bool,
    as_json: bool,
) -> None:
    """Drain a checkpoint now: over all nodes of the run's job while it runs, else of this node alone."""
    command = ["drain", *(["--prune"] if prunes else [])]
    become(command, iteration, run_dir_of(job_id, run_dir), job_dir, job_id, cap, as_json=as_json)


@ckpt.command(epilog=examples("slurm-resil ckpt rebuild --job 4711", "slurm-resil ckpt rebuild 500 --json"))
@click.argument("iteration", default="newest", callback=iteration_option)
@places
@job_option
@click.option("--cap", type=click.FloatRange(min=1), help="Limit of all movers together, bytes/s.")
@as_json_option
def rebuild(
    iteration: int | None,
    run_dir: str | None,
    job_dir: str | None,
    job_id: int | None,
    cap: float | None,
    as_json: bool,
) -> None:
    """Have shards back that were lost with nodes, from what the other nodes of their sets hold.

    Over all nodes of the run's job while it runs, each with the place that it has in the run now; else on this node
    alone. The launcher does the same by itself before ranks start. Ends with 0 when the checkpoint is whole, also when
    nothing was lost, and with 65, saying how many were lost and how many are covered, when it cannot be had back.
    """
    become(["rebuild"], iteration, run_dir_of(job_id, run_dir), job_dir, job_id, cap, as_json=as_json)
