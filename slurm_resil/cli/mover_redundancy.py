"""``slurm-resil mover encode`` and ``rebuild``: protect shards against the loss of nodes, and have them back."""

from __future__ import annotations

import os

import click

from slurm_resil.cli.moving import Screen, Stop, mover_options, run
from slurm_resil.comm.base import Communicator
from slurm_resil.core.schemes import Scheme
from slurm_resil.redundancy import encode as encoding
from slurm_resil.redundancy import rebuild as rebuilding


@click.command("encode")
@mover_options
@click.option("--scheme", default="xor", show_default=True, help="partner[:COPIES], xor or rs[:LOSSES].")
@click.option("--set-size", type=click.IntRange(2, 128), help="Nodes wanted in a set, where no file names the sets.")
@click.option("--sets", help='File that names the sets: {"version": 1, "sets": [["n1", "n5"]]}.')
@click.option("--json", "as_json", is_flag=True, help="JSON lines; the last one has the event 'encoded' or 'failed'.")
def encode_command(
    run_dir: str,
    job_dir: str,
    iteration: int | None,
    cap: float | None,
    transport: str,
    nice: bool,
    on_term: str,
    scheme: str,
    set_size: int | None,
    sets: str | None,
    as_json: bool,
) -> None:
    """Protect one checkpoint against the loss of nodes.

    One process per node, all with the same arguments. Ends with 0 when the checkpoint is protected (also when it was
    before), 65 when a shard is damaged, 75 when not all ranks have sealed, or SIGTERM or SIGINT stopped it, 78 when
    nothing can be protected so, 1 when storage refuses. Nothing counts unless it ends with 0; the shards stay valid.
    """
    options = encoding.Options(scheme=Scheme.parse(scheme), set_size=set_size, sets=sets, cap_bytes_s=cap)

    def work(comm: Communicator, stop: Stop, screen: Screen) -> encoding.Outcome:
        return encoding.encode(
            comm,
            run_dir=run_dir,
            job_dir=job_dir,
            iteration=iteration,
            options=options,
            env=dict(os.environ),
            stop=stop,
            progress=screen.progress,
        )

    outcome, _, screen = run(work, transport=transport, nice=nice, on_term=on_term, as_json=as_json)
    screen.line(
        "encoded",
        iteration=outcome.iteration,
        scheme=outcome.scheme,
        losses=outcome.losses,
        bytes=outcome.nbytes,
        parity_bytes=outcome.parity_bytes,
        seconds=round(outcome.seconds, 4),
        already=outcome.already,
    )


@click.command("rebuild")
@mover_options
@click.option("--json", "as_json", is_flag=True, help="JSON lines; the last one has the event 'rebuilt' or 'failed'.")
def rebuild_command(
    run_dir: str,
    job_dir: str,
    iteration: int | None,
    cap: float | None,
    transport: str,
    nice: bool,
    on_term: str,
    as_json: bool,
) -> None:
    """Have the shards back that were lost with nodes, on the nodes that have their places now.

    One process per node, all with the same arguments. Ends with 0 when the newest checkpoint that can be had is whole
    (also when nothing was lost), 65 when more was lost than is covered, 75 when SIGTERM or SIGINT stopped it, 1 when
    storage refuses. What survived is not touched.
    """

    def work(comm: Communicator, stop: Stop, screen: Screen) -> rebuilding.Outcome:
        return rebuilding.rebuild(
            comm,
            run_dir=run_dir,
            job_dir=job_dir,
            iteration=iteration,
            cap_bytes_s=cap,
            env=dict(os.environ),
            stop=stop,
            progress=screen.progress,
        )

    outcome, _, screen = run(work, transport=transport, nice=nice, on_term=on_term, as_json=as_json)
    screen.line(
        "rebuilt",
        iteration=outcome.iteration,
        nodes=list(outcome.nodes),
        bytes=outcome.nbytes,
        seconds=round(outcome.seconds, 4),
        passed_over=list(outcome.passed_over),
        corrupt=list(outcome.corrupt),
    )
