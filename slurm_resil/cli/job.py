"""``slurm-resil job``: one job, from Slurm's record and the run's own files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, get_args

import click
from ClusterShell.NodeSet import NodeSet

from slurm_resil.agent.asking import ask
from slurm_resil.agent.protocol import Reached
from slurm_resil.agent.uplink import LeaderPlace
from slurm_resil.catalog import RunCatalog
from slurm_resil.cli.draining import cancel_drain, known, shown
from slurm_resil.core import paths
from slurm_resil.core.errors import TryAgainError, missing_path
from slurm_resil.core.model import JobTimes
from slurm_resil.launch import records
from slurm_resil.slurm.scontrol import Commands

_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED")
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object.")
_RUN_DIR = click.option(
    "--run-dir",
    type=click.Path(file_okay=False),
    help="Run's directory. Default: .slurm-resil/JOB where it was submitted.",
)


@click.group()
def job() -> None:
    """Look at one job, have it checkpoint now, have it start again."""


def run_dir_of(slurm: Commands, job_id: int, given: str | None) -> str:
    """Directory of a job's run: as given, else where it is by default.

    Raises:
        ConfigError: It is not there.
        NotPermittedError: Slurm has no such job, or none any more.
        ServiceError: Slurm does not answer.
    """
    path = given
    if path is None:
        root = os.environ.get("SLURM_RESIL_PREFIX") or os.path.join(slurm.text(job_id, "%Z"), ".slurm-resil")
        path = paths.run_dir(root, os.environ.get("SLURM_RESIL_RUN_ID") or str(job_id))
    if not os.path.isdir(path):
        raise missing_path(path, "the run's directory", "name it with --run-dir")
    return path


def _say(values: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(values))
        return
    for key, value in values.items():
        click.echo(f"{key.replace('_', ' ')}: {value if value is not None else 'unknown'}")


def _deadline(found: JobTimes) -> dict[str, Any]:
    at = found.end.at
    return {
        "deadline": found.end.kind,
        "deadline_at": at.isoformat() if at else None,
        "left_s": round(at.timestamp() - time.time(), 1) if at else None,
        "preempted": found.preempted,
    }


@job.command("status")
@click.argument("job_id", type=click.IntRange(min=1))
@_RUN_DIR
@_JSON
def status(job_id: int, run_dir: str | None, as_json: bool) -> None:
    """State, nodes, restarts, deadline, and the newest checkpoint at each level of safety.

    local: all ranks have sealed it in their nodes' burst buffers; protected: it survives the loss of nodes, too;
    durable: it is on the parallel file system, verified. drain: how far the drain is that runs, or how the last one
    ended.
    """
    slurm = Commands(os.environ)
    record = slurm.job(job_id)
    run = run_dir_of(slurm, job_id, run_dir)
    durable = RunCatalog(run).durable()
    levels = records.levels(run)
    values = {
        "job": job_id,
        "state": record.state,
        "nodes": str(NodeSet.fromlist(record.nodes)),
        "restarts": record.restarts,
        **_deadline(record.times),
        "run_dir": run,
        "local": levels and (levels.local or None),
        "protected": levels and (levels.protected or None),
        "durable": durable[0] if durable else None,
        "drain": shown(known(run), running=record.state in _RUNNING, as_json=as_json),
    }
    _say(values, as_json=as_json)


@job.command("deadline")
@click.argument("job_id", type=click.IntRange(min=1))
@_JSON
def deadline(job_id: int, as_json: bool) -> None:
    """When Slurm will end the job."""
    _say({"job": job_id, **_deadline(Commands(os.environ).job(job_id).times)}, as_json=as_json)


@job.command("checkpoint")
@click.argument("job_id", type=click.IntRange(min=1))
@_RUN_DIR
@click.option("--level", type=click.Choice(get_args(Reached)), default="durable", show_default=True)
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Seconds.")
@_JSON
def checkpoint(job_id: int, run_dir: str | None, level: Reached, timeout_s: float, as_json: bool) -> None:
    """Have the job checkpoint now, and wait until it is as safe as asked for.

    A checkpoint is protected when it survives the loss of nodes: by redundancy, or because it is durable.
    """
    slurm = Commands(os.environ)
    place = LeaderPlace(run_dir=run_dir_of(slurm, job_id, run_dir), job_id=job_id, attempt=None)
    answer = ask(place, level=level, timeout_s=timeout_s)
    if not answer.ok:
        raise TryAgainError(answer.words or f"no checkpoint is {level} after {timeout_s:g} s", job=job_id)
    _say({"job": job_id, "iteration": answer.iteration, "level": level}, as_json=as_json)


@job.command("cancel-drain")
@click.argument("job_id", type=click.IntRange(min=1))
@_RUN_DIR
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1), default=60.0, show_default=True, help="Seconds.")
@_JSON
def cancel(job_id: int, run_dir: str | None, timeout_s: float, as_json: bool) -> None:
    """Cancel the drain that runs, and wait for its end.

    The checkpoint stays in the burst buffers, and what was written of it is gone on with by a later drain. Training and
    its next checkpoints go on as before.
    """
    ended = cancel_drain(run_dir_of(Commands(os.environ), job_id, run_dir), timeout_s=timeout_s)
    _say({"job": job_id, "iteration": ended.iteration, "drain": ended.state}, as_json=as_json)


@job.command("requeue")
@click.argument("job_id", type=click.IntRange(min=1))
def requeue(job_id: int) -> None:
    """Have Slurm start the job again; without the two minutes' wait if its engine does it."""
    slurm = Commands(os.environ)
    slurm.run("scontrol", "requeue", slurm.job(job_id).label)
