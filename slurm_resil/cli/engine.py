"""``slurm-resil engine``: the recovery engine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
from pathlib import Path

import click

from slurm_resil.comm.auth import MungeAuth
from slurm_resil.comm.munge import socket_path
from slurm_resil.core import config, log, units
from slurm_resil.recovery.engine import Engine
from slurm_resil.recovery.store import Store
from slurm_resil.slurm.scontrol import Commands

_DB = click.option("--db", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Its database.")


@click.group()
def engine() -> None:
    """Continue jobs on good nodes; one per cluster, as SlurmUser or root."""


@engine.command("run")
@click.option("--listen", required=True, metavar="HOST:PORT", help="One address of this host.")
@_DB
@click.option("--mode", type=click.Choice(["observe", "act"]), default="observe", show_default=True)
@click.option("--spares", default="", help="Name of the reservation that holds the spare nodes.")
def run(listen: str, db: Path, mode: str, spares: str) -> None:
    """Run until SIGTERM."""
    log.configure()
    os.umask(0o077)
    host, port = units.host_port(listen)
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    store = Store(str(db))
    running = Engine(Commands(os.environ), store, mode=mode, spares=spares)
    server = running.start(host, port, MungeAuth(socket_path(os.environ)))
    while not over.wait(1.0):
        pass
    server.close()
    running.stop()


@engine.command("incidents")
@click.option(
    "--db", type=click.Path(dir_okay=False, path_type=Path), help="Its database; default: [engine] db of site.toml."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the audit trail.")
def incidents(db: Path | None, as_json: bool) -> None:
    """What was asked, what was done, and how it ended."""
    db = db or Path(config.load(os.environ).engine.db)
    if not db.exists():
        raise click.BadParameter(f"{db} does not exist", param_hint="--db")
    with contextlib.closing(Store(str(db), readonly=True)) as store:
        entries = [dataclasses.asdict(entry) | {"trail": store.trail(entry.id)} for entry in store.incidents()]
    if as_json:
        click.echo(json.dumps({"incidents": entries}))
        return
    for entry in entries:
        click.echo(f"#{entry['id']} job {entry['job']} {entry['reason']} {','.join(entry['bad'])}: {entry['outcome']}")
