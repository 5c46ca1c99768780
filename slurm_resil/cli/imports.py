"""``slurm-resil ckpt import``: a checkpoint of another program as a drained checkpoint of a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import click

from slurm_resil.catalog import RunCatalog
from slurm_resil.cli.places import as_json_option, examples, places, resolve
from slurm_resil.cli.table import columns, progress, size
from slurm_resil.comm.base import from_os_error
from slurm_resil.comm.local import LocalCommunicator
from slurm_resil.core import fsio
from slurm_resil.core.errors import UsageError
from slurm_resil.core.progress import Progress
from slurm_resil.drain.collective import Options, Outcome, drain

_SPOOL = ".import-"


@contextlib.contextmanager
def _spool(directory: str) -> Iterator[str]:
    """A directory that is removed at the end; those of imports that were killed are, too."""
    with fsio.open_dir(directory) as parent:
        for name in os.listdir(parent):
            if name.startswith(_SPOOL):
                with contextlib.suppress(OSError), fsio.open_dir(name, dir_fd=parent) as fd:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with whoever held it
                    fsio.rmtree_at(parent, name)
        made = tempfile.mkdtemp(prefix=_SPOOL, dir=directory)
        with fsio.open_dir(made) as fd:
            with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it either
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                yield made
            finally:
                fsio.rmtree_at(parent, os.path.basename(made))


def _tie(_context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [text.partition("=") for text in texts]
    for name, _, other in pairs:
        if not name or not other:
            raise click.BadParameter(f"{name!r} is not NAME=OTHER, as in model/head.weight=model/wte.weight")
    return [(name, other) for name, _, other in pairs]


@click.command(
    "import",
    epilog=examples(
        "slurm-resil ckpt import 1 dcp/step-5000 --run-dir runs/llama --as model=model --as optimizer:AdamW=optim",
        "sbatch --resil-run-id=llama train.sbatch",
    ),
)
@click.argument("iteration", type=click.IntRange(min=1))
@click.argument("source", type=click.Path())
@places
@click.option(
    "--as",
    "rules",
    multiple=True,
    metavar="KEY[:KIND][=PLACE]",
    help="What becomes the state's KEY: what is at PLACE in the source (keys joined by dots, or what names begin with; "
    "default: what is under KEY, else all of it). KIND is module, value, stateful, or the class of an optimizer; "
    "default: by what it looks like. Repeatable; default: each key of the source is one of the state, or all of it is "
    "the module 'model'.",
)
@click.option(
    "--tie",
    "ties",
    multiple=True,
    metavar="NAME=OTHER",
    callback=_tie,
    help="The tensor NAME is the same memory as OTHER, as in model/head.weight=model/wte.weight; repeatable.",
)
@click.option(
    "--spool", type=click.Path(file_okay=False, exists=True), help="For a copy meanwhile. Default: the run's."
)
@click.option("--dry-run", is_flag=True, help="Say what would become what; write nothing.")
@as_json_option
def import_(
    iteration: int,
    source: str,
    run_dir: str | None,
    job_dir: str | None,
    rules: tuple[str, ...],
    ties: list[tuple[str, str]],
    spool: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make SOURCE the drained checkpoint of ITERATION, from which a run then goes on.

    SOURCE is a directory of torch.distributed.checkpoint, a file of torch.save, or safetensors (a file, an index, or
    the directory). What is in it is read as tensors and plain values only: no code in it is ever run, and what would
    need that is refused. Its checksums are compared, as far as it has any; what is written is read back and published
    as a drain's. Restore it with the same keys in the state, or with LoadOptions(include=...) where it has fewer.
    """
    with contextlib.ExitStack() as stack:
        if run_dir is not None and os.path.isdir(os.path.dirname(os.path.abspath(run_dir))) and not dry_run:
            stack.enter_context(_made(run_dir))
        row = _import(iteration, source, run_dir, job_dir, rules, ties, spool, dry_run=dry_run, show=not as_json)
    if as_json:
        click.echo(json.dumps(row))
        return
    what = "would become" if dry_run else "became"
    click.echo(
        f"{row['format']} {source} {what} iteration {iteration} of {row['run_dir']}: {row['tensors']} tensors, "
        f"{size(row['bytes'])}"
    )
    columns(("key", "kind"), [(str(key), str(kind)) for key, kind in row["state"].items()])


@contextlib.contextmanager
def _made(run_dir: str) -> Iterator[None]:
    """The directory of a run that has not begun yet; it goes again if nothing comes to be in it."""
    try:
        os.mkdir(run_dir)
    except FileExistsError:
        yield
        return
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(run_dir)
        raise


def _import(
    iteration: int,
    source: str,
    run_dir: str | None,
    job_dir: str | None,
    rules: tuple[str, ...],
    ties: list[tuple[str, str]],
    spool: str | None,
    *,
    dry_run: bool,
    show: bool,
) -> dict[str, Any]:
    from slurm_resil.ckpt import adopt, foreign  # torch: not for --help

    run_dir, _ = resolve(run_dir, job_dir)
    run_id = os.path.basename(os.path.abspath(run_dir))
    if iteration in RunCatalog(run_dir).durable():
        raise UsageError(f"{run_dir} has a checkpoint of iteration {iteration} already", mend="take another iteration")
    opened = foreign.open_foreign(source)
    state = adopt.mapped(opened, [adopt.Rule.parse(text) for text in rules], ties)
    flat = adopt.taken_apart(state)
    row: dict[str, Any] = {
        "source": source,
        "format": opened.kind,
        "iteration": iteration,
        "run_dir": run_dir,
        "tensors": len(flat.items),
        "bytes": flat.nbytes,
        "state": {key: node["$"] if isinstance(node, dict) else "value" for key, node in flat.values["of"]},
        "file": None,
    }
    if not dry_run:
        try:
            with _spool(spool or run_dir) as directory:
                written, _ = adopt.write(directory, opened, flat, run_id=run_id, iteration=iteration)
                outcome = _drain(run_dir, written, iteration, show=show)
        except OSError as error:
            raise from_os_error(error, f"importing {source}") from error
        row |= {"file": outcome.manifest.file, "file_bytes": outcome.manifest.file_bytes}
    return row


def _drain(run_dir: str, job_dir: str, iteration: int, *, show: bool) -> Outcome:
    from slurm_resil.drain.skeleton import skeleton

    with progress("import", None, show=show) as bar:

        def told(one: Progress) -> None:
            bar.set(one.phase, one.done_bytes, one.total_bytes)

        return drain(
            LocalCommunicator(),
            run_dir=run_dir,
            job_dir=job_dir,
            iteration=iteration,
            skeleton=skeleton,
            options=Options(owner=f"import {os.getpid()} on {os.uname().nodename}"),
            progress=told,
        )
