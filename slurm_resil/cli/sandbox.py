"""``slurm-resil sandbox``: a private, real Slurm cluster in one directory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from slurm_resil.core.errors import EXIT_NO_SERVICE, UsageError
from slurm_resil.sandbox import Sandbox, SandboxSpec
from slurm_resil.sandbox.ns import refusal
from slurm_resil.sandbox.spec import DEFAULT_DIR, DIR_ENV, default_dir
from slurm_resil.sandbox.teardown import tear_down

F = TypeVar("F", bound=Callable[..., Any])
_SIZE = re.compile(r"^(\d+)\s*([KMGT]?)(?:i?B)?$", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _size(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    match = _SIZE.match(value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is not a size such as 512M or 2G")
    return int(match[1]) * _UNITS[match[2].upper()]


def _absolute(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Path | None:
    return None if value is None else Path(os.path.abspath(value))


def _dir_option(function: F) -> F:
    text = f"The sandbox's directory.  [default: ${DIR_ENV}, then {DEFAULT_DIR}]"
    return click.option("--dir", "path", metavar="DIR", callback=_absolute, help=text)(function)


def _file_option(name: str, text: str) -> Callable[[F], F]:
    return click.option(name, metavar="FILE", callback=_absolute, help=text)


def _attach(path: Path | None) -> Sandbox:
    return Sandbox.attach(path or default_dir())


@click.group()
def sandbox() -> None:
    """A private, real Slurm cluster in one directory of this host.

    As root each node is a slurmd in namespaces of its own: own hostname, address, /dev/shm and burst buffer. Nothing of
    the system's configuration is touched, and `down` leaves nothing.
    """


@sandbox.command()
@_dir_option
@click.option("--nodes", type=int, default=4, show_default=True, help="Number of nodes, the spares included.")
@click.option("--cpus", type=int, default=4, show_default=True, help="CPUs that Slurm believes each node has.")
@click.option("--spares", type=int, default=0, show_default=True, help="Keep the last so many nodes in a reservation.")
@click.option("--accounting", is_flag=True, help="Run slurmdbd with a MariaDB of its own.")
@click.option("--bb-size", callback=_size, default="2G", show_default=True, help="Burst buffer of each node.")
@click.option("--grace-time", type=int, default=20, show_default=True, help="GraceTime of partition train, seconds.")
@_file_option("--prolog", "Program for Prolog.")
@_file_option("--epilog", "Program for Epilog.")
@_file_option("--slurm-conf-extra", "Lines that come last in slurm.conf.")
@_file_option("--topology", "A topology.conf, for topology/tree or topology/block.")
@click.option("--spank", multiple=True, metavar="'FILE [ARGS]'", help="A SPANK plugin; may be given several times.")
@click.option("--rootless", is_flag=True, help="Use no namespaces, as for an ordinary user.")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds until all nodes must be idle.")
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def up(path: Path | None, as_json: bool, bb_size: int, grace_time: int, timeout: float, **options: Any) -> None:
    """Start a cluster; returns when all nodes are idle.

    Two partitions: jobs in `urgent` preempt those in `train`. Users: alice, bob, root.
    """
    options["spank"] = tuple(_absolute_spank(entry) for entry in options["spank"])
    spec = SandboxSpec(
        dir=path or default_dir(), bb_bytes=bb_size, grace_time_s=grace_time, start_timeout_s=timeout, **options
    )
    started = Sandbox.up(spec)
    if as_json:
        click.echo(json.dumps(started.status()))
        return
    where = "" if path is None and os.environ.get(DIR_ENV, DEFAULT_DIR) == DEFAULT_DIR else f" --dir {spec.dir}"
    click.echo(f"{spec.nodes} nodes are idle ({started.version_text}): {', '.join(spec.node_names)}")
    click.echo(f"shared directory {started.pfs}, burst buffer {started.bb}, logs {started.layout.log}")
    for line in started.lost:
        click.echo(f"lost: {line}", err=True)
    few = min(2, spec.nodes - spec.spares)
    click.echo(f"use it:  slurm-resil sandbox exec{where} --user {started.users[0]} -- srun -N{few} hostname")
    click.echo(f"end it:  slurm-resil sandbox down{where}")


def _absolute_spank(entry: str) -> str:
    file, *arguments = entry.split() or [""]
    return " ".join((os.path.abspath(file) if file else "", *arguments))


@sandbox.command()
@_dir_option
def down(path: Path | None) -> None:
    """End a cluster, also one that crashed; nothing of it is left."""
    target = path or default_dir()
    there = tear_down(target)
    click.echo(f"the sandbox {target} is gone" if there else f"there is no sandbox in {target}")


@sandbox.command()
@_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(path: Path | None, as_json: bool) -> None:
    """Show nodes, daemons and paths."""
    value = _attach(path).status()
    if as_json:
        click.echo(json.dumps(value))
    else:
        click.echo(f"{value['dir']}: {value['slurm_version']}, {value['mode']}")
        click.echo(f"SLURM_CONF={value['slurm_conf']}  PFS={value['pfs']}  BB={value['bb']}  logs={value['log']}")
        for name, daemon in value["daemons"].items():
            click.echo(f"{name:<12} pid {daemon['pid']:<8} {'alive' if daemon['alive'] else 'DEAD'}")
        for node in value["nodes"]:
            words = [node["state"], f"link {node['link']}", "alive" if node["alive"] else "DEAD"]
            words += ["spare"] if node["spare"] else []
            click.echo(f"{node['name']:<12} {node['address']:<16} {', '.join(words)}")
    if not value["daemons"].get("slurmctld", {}).get("alive"):
        raise click.exceptions.Exit(EXIT_NO_SERVICE)


@sandbox.command(name="exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_dir_option
@click.option("--user", help="As this user.  [default: alice; without root: you]")
@click.option("--node", metavar="NAME", help="Inside this node instead of the login node.")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="Set an environment variable.")
@click.option("--cwd", metavar="DIR", help="Start there instead of in the user's home directory.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(
    path: Path | None,
    user: str | None,
    node: str | None,
    env: tuple[str, ...],
    cwd: str | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND in the cluster; ends with COMMAND's exit code."""
    bad = [entry for entry in env if "=" not in entry]
    if bad:
        raise UsageError(f"--env {bad[0]!r} is not NAME=VALUE")
    target = _attach(path)
    extra = dict(entry.split("=", 1) for entry in env)
    full = target.command(command, user=user or target.users[0], node=node, env=extra, cwd=cwd)
    os.chdir(full.cwd)
    try:
        os.execvpe(full.argv[0], full.argv, full.env)  # noqa: S606 - a list, no shell
    except OSError as error:
        words, code = refusal(full.argv[0], error, full.env.get("PATH", ""))
        click.echo(f"slurm-resil: {words}", err=True)
        raise click.exceptions.Exit(code) from error


@sandbox.command()
@_dir_option
@click.argument("daemon", required=False)
@click.option("--lines", "-n", type=int, default=20, show_default=True, help="Last so many lines.")
def logs(path: Path | None, daemon: str | None, lines: int) -> None:
    """Show the end of the daemons' logs; DAEMON is the beginning of a file name, such as slurmctld or slurmd-node1."""
    from slurm_resil.sandbox.procs import tail

    layout = _attach(path).layout
    for file in sorted(layout.log.iterdir()):
        text = tail(file, lines=lines) if file.name.startswith(daemon or "") else ""
        if text:
            click.echo(f"--- {file}\n{text}")


@sandbox.group()
def node() -> None:
    """Faults: what can befall a node."""


@node.command()
@_dir_option
@click.argument("name")
def kill(path: Path | None, name: str) -> None:
    """SIGKILL everything of the node NAME; its burst buffer stays."""
    _attach(path).node_kill(name)


@node.command()
@_dir_option
@click.argument("name")
def cut(path: Path | None, name: str) -> None:
    """Take the link of the node NAME down."""
    _attach(path).node_cut(name)


@node.command()
@_dir_option
@click.argument("name")
def heal(path: Path | None, name: str) -> None:
    """Take the link of the node NAME up again."""
    _attach(path).node_heal(name)


@node.command()
@_dir_option
@click.argument("name")
def wipe(path: Path | None, name: str) -> None:
    """Empty the burst buffer and /dev/shm of the node NAME."""
    _attach(path).node_wipe(name)


@node.command()
@_dir_option
@click.argument("name")
@click.option("--resume", is_flag=True, help="Also take it out of DOWN or DRAIN.")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds to wait for Slurm.")
def restore(path: Path | None, name: str, resume: bool, timeout: float) -> None:
    """Bring the node NAME back: link up, slurmd started if it is dead; returns when Slurm calls it usable."""
    _attach(path).node_restore(name, resume=resume, timeout_s=timeout)
