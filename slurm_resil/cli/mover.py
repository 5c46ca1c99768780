"""``slurm-resil mover``: short MPI programs over the nodes of a job, one process per node."""

from __future__ import annotations

import os
import signal

import click

from slurm_resil.cli.mover_fetch import fetch_command
from slurm_resil.cli.mover_late import late_command
from slurm_resil.cli.mover_redundancy import encode_command, rebuild_command
from slurm_resil.cli.moving import Screen, Stop, mover_options, run
from slurm_resil.cli.prune import retention
from slurm_resil.comm.base import Communicator
from slurm_resil.core import io_hints
from slurm_resil.core.config import RETRY_S
from slurm_resil.core.errors import ResilError
from slurm_resil.core.retention import Retention
from slurm_resil.drain.collective import BUFFER_BYTES, VERIFY_CACHE, VERIFY_STORAGE, Options, Outcome, drain
from slurm_resil.drain.orders import Orders
from slurm_resil.launch.retain import Pruner


def _hints(_: object, __: object, values: tuple[str, ...]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for key, equals, value in pairs:
        wrong = io_hints.fault(key, value) if equals else f"{key!r} is not like romio_cb_write=disable"
        if wrong:
            raise click.BadParameter(wrong)
    return {key: value for key, _, value in pairs}


def report(screen: Screen, outcome: Outcome) -> None:
    """Print the last line."""
    manifest = outcome.manifest
    screen.line(
        "drained",
        iteration=manifest.iteration,
        bytes=sum(item.nbytes for item in manifest.items),
        seconds=round(outcome.seconds, 4),
        written_bytes=[] if outcome.already else list(outcome.written_bytes),
        already=outcome.already,
        file=manifest.file,
        read_from=outcome.read_from,
        costs_s={} if outcome.already else manifest.costs_s,
    )


@click.group()
def mover() -> None:
    """Move checkpoints between burst buffers and the parallel file system (started by the launcher over MPI)."""


@mover.command("drain")
@mover_options
@click.option("--buffer", "buffer_bytes", type=int, default=BUFFER_BYTES, show_default=True, help="Bytes for data.")
@click.option("--hint", "hints", multiple=True, callback=_hints, help="MPI-IO hint KEY=VALUE; repeatable.")
@click.option(
    "--gather/--no-gather", default=True, show_default=True, help="Put narrow parts together here, or leave it to MPI."
)
@click.option(
    "--verify",
    type=click.Choice((VERIFY_STORAGE, VERIFY_CACHE)),
    default=VERIFY_STORAGE,
    show_default=True,
    help="Read back what storage has, or only what the page cache has.",
)
@click.option(
    "--retry",
    "retry_s",
    type=click.FloatRange(min=0),
    default=RETRY_S,
    show_default=True,
    help="Seconds of waiting without getting on after which storage that refuses is given up.",
)
@click.option("--prune", "prunes", is_flag=True, help="Then delete what the retention settings do not keep.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines; the last one has the event 'drained' or 'failed'.")
def drain_command(
    run_dir: str,
    job_dir: str,
    iteration: int | None,
    cap: float | None,
    buffer_bytes: int,
    hints: dict[str, str],
    gather: bool,
    verify: str,
    transport: str,
    nice: bool,
    on_term: str,
    retry_s: float,
    prunes: bool,
    as_json: bool,
) -> None:
    """Write one checkpoint into one file of global tensors, verify and publish it.

    One process per node, all with the same arguments. Ends with 0 when the checkpoint is durable (also when it was
    before), 65 when a shard is damaged, 75 when not all ranks have sealed, another mover is at it, or SIGTERM or SIGINT
    stopped it, 78 when a directory is missing, 1 when storage refuses. Nothing is published unless it ends with 0. What
    a drain that did not come to its end has written is found, checked and gone on with by the next one.
    """
    from slurm_resil.drain.skeleton import skeleton  # h5py: not for --help

    rules = retention(os.environ) if prunes else Retention()
    options = Options(
        buffer_bytes=buffer_bytes,
        cap_bytes_s=cap,
        hints=hints,
        gather=gather,
        verify=verify,
        retry_s=retry_s,
        finish=on_term == "finish",
        owner=os.path.basename(job_dir),
    )

    def work(comm: Communicator, stop: Stop, screen: Screen) -> Outcome:
        return drain(
            comm,
            run_dir=run_dir,
            job_dir=job_dir,
            iteration=iteration,
            skeleton=skeleton,
            options=options,
            stop=stop,
            progress=screen.progress,
            traces=stop.traces,
            tell=lambda event, fields: screen.line(event, **fields),
            heed=lambda orders: _heed(screen, orders),
            hangs=lambda doing, seconds, over: _hangs(screen, doing, seconds, over=over),
        )

    outcome, comm, screen = run(work, transport=transport, nice=nice, on_term=on_term, as_json=as_json)
    if rules.deletes and comm.rank == 0:
        _prune(screen, run_dir, rules)
    report(screen, outcome)


def _heed(screen: Screen, orders: Orders) -> None:
    """Follow what was ordered meanwhile: a drain that is to finish goes on through the SIGTERM of a grace period."""
    if orders.finish:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    screen.line("ordered", cap_bytes_s=orders.cap_bytes_s, finish=orders.finish)


def _hangs(screen: Screen, doing: str, seconds: float, *, over: bool) -> None:
    """Say where a call into storage takes long; each rank does, because each knows of its own calls only."""
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    screen.line_of_any("went_on" if over else "hangs", node=node, doing=doing, seconds=round(seconds, 1))


def _prune(screen: Screen, run_dir: str, rules: Retention) -> None:
    """Delete old checkpoints. The new one is durable, whatever comes of this."""
    try:
        done = Pruner(run_dir, rules).prune()
    except ResilError as error:
        screen.line("prune_failed", error=str(error))
        return
    left = {str(iteration): why for iteration, why in (done.left | done.failed).items()}
    screen.line("pruned", iterations=done.deleted, bytes=done.nbytes, left=left)


mover.add_command(encode_command)
mover.add_command(rebuild_command)
mover.add_command(fetch_command)
mover.add_command(late_command)
