"""``slurm-resil mover fetch``: stage a drained checkpoint into the nodes' burst buffers before ranks restore."""

from __future__ import annotations

import os

import click

from slurm_resil.cli.moving import Screen, Stop, iteration_option, mover_options, run
from slurm_resil.cli.nodes import become, run_dir_of
from slurm_resil.cli.places import as_json_option, examples, job_option, places
from slurm_resil.comm.base import Communicator
from slurm_resil.drain import fetch as fetching

_what = click.option(
    "--what",
    type=click.Choice((fetching.NEED, fetching.ALL)),
    default=fetching.NEED,
    show_default=True,
    help="What the ranks of each node will read, or the whole file on every node.",
)


@click.command("fetch", epilog=examples("slurm-resil ckpt fetch --job 4711", "slurm-resil ckpt fetch 500 --what all"))
@click.argument("iteration", default="newest", callback=iteration_option)
@places
@job_option
@_what
@click.option("--cap", type=click.FloatRange(min=1), help="Limit of all movers together, bytes/s.")
@as_json_option
def fetch(
    iteration: int | None,
    run_dir: str | None,
    job_dir: str | None,
    job_id: int | None,
    what: str,
    cap: float | None,
    as_json: bool,
) -> None:
    """Stage a durable checkpoint in the burst buffers of all nodes of the run's job, or of this node if none runs.

    Ranks that restore it read it from there, and the file for what is missing or damaged. The launcher does this at the
    start of an attempt; by hand it is for a prolog, and for nodes that stand by.
    """
    become(["fetch", "--what", what], iteration, run_dir_of(job_id, run_dir), job_dir, job_id, cap, as_json=as_json)


@click.command("fetch")
@mover_options
@_what
@click.option("--json", "as_json", is_flag=True, help="JSON lines; the last one has the event 'fetched' or 'failed'.")
def fetch_command(
    run_dir: str,
    job_dir: str,
    iteration: int | None,
    cap: float | None,
    transport: str,
    nice: bool,
    on_term: str,
    what: str,
    as_json: bool,
) -> None:
    """Stage a drained checkpoint into the burst buffers: every byte is read once and sent to the nodes that need it.

    One process per node, all with the same arguments; before the ranks start or while they do, and from a prolog or on
    a standby node too. Ranks that restore read what is staged and verified, and the file for the rest. Ends with 0,
    also when a node has no room and stages nothing; 65 when nothing is durable or the file is damaged, 75 when SIGTERM
    or SIGINT stopped it, 78 when a directory is missing, 1 when storage refuses.
    """

    def work(comm: Communicator, stop: Stop, screen: Screen) -> fetching.Outcome:
        return fetching.fetch(
            comm,
            run_dir=run_dir,
            job_dir=job_dir,
            iteration=iteration,
            env=dict(os.environ),
            what=what,
            cap_bytes_s=cap,
            stop=stop,
            progress=screen.progress,
        )

    outcome, _, screen = run(work, transport=transport, nice=nice, on_term=on_term, as_json=as_json)
    screen.line(
        "fetched",
        iteration=outcome.iteration,
        bytes=outcome.staged_bytes,
        kept_bytes=outcome.kept_bytes,
        read_bytes=list(outcome.read_bytes),
        nodes=outcome.nodes,
        of=outcome.of,
        seconds=round(outcome.seconds, 4),
        words=_words(outcome),
    )


def _words(outcome: fetching.Outcome) -> str:
    if not outcome.of:
        return "; ".join(["nothing to stage", *outcome.words])
    done = f"{outcome.nodes} of {outcome.of} nodes have what they need, {sum(outcome.read_bytes)} bytes were read"
    return "; ".join([done, *outcome.words])
