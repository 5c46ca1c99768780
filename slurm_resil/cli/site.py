"""``slurm-resil site``: check the site's configuration, and write what Slurm and systemd need of it."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Mapping

import click

from slurm_resil.cli.protection import nodes_option
from slurm_resil.core import config, fsio
from slurm_resil.core.errors import ConfigError, NotPermittedError
from slurm_resil.core.settings import Settings
from slurm_resil.hooks import base
from slurm_resil.hooks.command import NAMES, command
from slurm_resil.launch.protect import describe
from slurm_resil.slurm.scontrol import Commands

_MARK = "# written by `slurm-resil site`"
_ETC = os.path.dirname(base.DEFAULT_CONFIG)
_SITE = click.option("--site", "path", metavar="FILE", help=f"Default: ${config.PATH_VARIABLE}, {config.DEFAULT_PATH}.")
_PYTHON = click.option("--python", default=sys.executable, help="Interpreter on the nodes. Default: this one.")
_PACKAGES = click.option("--packages", default="", help="Directory on the nodes that holds slurm_resil. Default: ours.")
_PLUGIN = click.option("--plugin", default="slurm_resil.so", show_default=True, help="The SPANK plugin on the nodes.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
    """A file for the site.

    Attributes:
        target: Where it belongs.
        text: What is in it.
        mode: Permission bits.
    """

    target: str
    text: str
    mode: int = 0o644


def render_files(site: config.Site, *, python: str, packages: str = "", plugin: str) -> dict[str, Rendered]:
    """Make the files of a site.

    Args:
        site: Its configuration.
        python: Interpreter on the nodes.
        packages: Directory on the nodes that holds the package; empty: where this one is.
        plugin: SPANK plugin; a name alone is looked for in Slurm's PluginDir.

    Returns:
        Files by their name below the output directory.

    Raises:
        ConfigError: Hooks need a directory that is the site's, or a path cannot be put into a file.
    """
    root = site.burst_buffer.root
    if root is None:
        raise ConfigError(
            "prolog and epilog need a burst buffer that belongs to the site",
            mend='write [burst_buffer] root = "/local/slurm-resil" into site.toml; without hooks nothing is needed',
        )
    odd = [
        f"{path!r} holds a space or a quote"
        for path in (python, packages, plugin, root, site.engine.db)
        if set(path) & set("'\" \\%")
    ]
    if not python.startswith("/"):
        odd.append(f"--python is {python!r}, an absolute path is needed: slurmd has no PATH to rely on")
    if odd:
        raise ConfigError("these paths cannot be used in scripts and units", faults=tuple(odd))
    hooks: dict[str, object] = {"bb_root": root, "always": site.burst_buffer.all_jobs}
    if site.drain.late == "epilog":
        hooks |= {"late": True, "late_limit": f"{site.drain.late_limit_s:.0f}"}
    if site.burst_buffer.keep_s is not None:
        hooks["keep"] = f"{site.burst_buffer.keep_s:.0f}"
    if site.burst_buffer.log:
        hooks["log"] = site.burst_buffer.log
    scripts = {name: f"/etc/slurm/{name}.d/slurm-resil.sh" for name in NAMES}
    files = {
        "hooks.json": Rendered(target=base.DEFAULT_CONFIG, text=json.dumps(hooks, indent=2, ensure_ascii=False) + "\n")
    }
    for name, target in scripts.items():
        line = shlex.join(command(name, base.DEFAULT_CONFIG, python=python, packages=packages))
        files[f"{name}.d/slurm-resil.sh"] = Rendered(
            target=target, text=f"#!/bin/sh\n{_MARK}\nexec {line}\n", mode=0o755
        )
    files["slurm.conf"] = Rendered(
        target=f"{_ETC}/slurm.conf",
        text=f"{_MARK}; put `include {_ETC}/slurm.conf` at the end of slurm.conf.\n"
        "# A site with a Prolog and an Epilog of its own calls these two scripts from there instead.\n"
        f"Prolog={scripts['prolog']}\nEpilog={scripts['epilog']}\n"
        "# the prolog runs on every node of the job before its script starts, not at the first step there\n"
        "PrologFlags=Alloc\n# a job that lost a node comes back\nJobRequeue=1\n",
    )
    files["plugstack.conf"] = Rendered(
        target=f"{_ETC}/plugstack.conf",
        text=f"{_MARK}; put `include {_ETC}/plugstack.conf` into plugstack.conf.\n"
        "# optional: a build for another release of Slurm breaks no command\n"
        f"optional {plugin}\n",
    )
    files["tmpfiles.d/slurm-resil.conf"] = Rendered(
        target="/etc/tmpfiles.d/slurm-resil.conf",
        text=f"{_MARK}\n# the burst buffer belongs to root; the prolog makes a directory in it for each job\n"
        f"d {root} 0755 root root -\n",
    )
    if site.engine.address:
        argv = [python, "-m", "slurm_resil", "engine", "run", "--listen", site.engine.address]
        argv += ["--db", site.engine.db, "--mode", site.engine.mode]
        argv += ["--spares", site.spares.reservation] if site.spares.reservation else []
        files["systemd/slurm-resil-engine.service"] = Rendered(
            target="/etc/systemd/system/slurm-resil-engine.service",
            text=f"{_MARK}\n# on one host of the cluster\n[Unit]\nDescription=Recovery engine of slurm_resil\n"
            "After=network-online.target munge.service slurmctld.service\nWants=network-online.target\n\n[Service]\n"
            f"ExecStart={shlex.join(argv).replace('%', '%%')}\n"
            f"ExecStartPre=/bin/mkdir -p -m 0700 {os.path.dirname(site.engine.db)}\n"
            # each connection has a descriptor and a thread
            "Restart=on-failure\nRestartSec=5\nLimitNOFILE=65536\nTasksMax=20000\n"
            "UMask=0077\nNoNewPrivileges=true\nProtectHome=true\nPrivateTmp=true\n\n"
            "[Install]\nWantedBy=multi-user.target\n",
        )
    return files


def described(site: config.Site, env: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """Every value of the configuration with its source, and what a job of the calling user would get."""
    found: dict[str, dict[str, object]] = {}
    for section in dataclasses.fields(site):
        if section.name in ("path", "given"):
            continue
        for key, field in config.keys(section.name).items():
            value = getattr(getattr(site, section.name), field.name)
            value = dict(value) if isinstance(value, Mapping) else value
            found[f"{section.name}.{key}"] = {"value": value, "source": site.source(section.name, key)}
    for name, setting in vars(Settings.from_env(env, site)).items():
        found[f"job.{name}"] = {"value": setting.value, "source": setting.source}
    return found


@click.group()
def site() -> None:
    """The site's configuration: one file, site.toml."""


@site.command()
@_SITE
@nodes_option("Ask Slurm, and say how a job on these nodes is protected.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(path: str | None, nodes: tuple[str, ...], as_json: bool) -> None:
    """Validate site.toml and the environment; show every value with its source."""
    try:
        made = config.load(os.environ, path)
        values = described(made, os.environ)
    except ConfigError as error:
        if as_json:
            faults = list(error.faults) or [str(error)]
            click.echo(json.dumps({"ok": False, "path": path or "", "faults": faults, "values": {}}))
            sys.exit(error.exit_code)
        raise
    said = describe(Settings.from_env(os.environ, made), made, nodes, Commands(os.environ)) if nodes else None
    if as_json:
        found = {"ok": True, "path": made.path, "faults": [], "values": values}
        click.echo(json.dumps(found | ({"protection": vars(said)} if said else {}), default=str))
        return
    for name, entry in values.items():
        click.echo(f"{name:<28} {json.dumps(entry['value'], default=str):<36} {entry['source']}")
    if said:
        lines = [("protection", words) for words in said.words] + [("warning", words) for words in said.warnings]
        lines += [("unknown", f"which nodes fail together: {words}") for words in said.unknown]
        for kind, words in lines:
            click.echo(f"{kind}: {words}")


@site.command()
@_SITE
@click.option("--out", required=True, type=click.Path(file_okay=False), help="Directory for the files; made if needed.")
@_PYTHON
@_PACKAGES
@_PLUGIN
def render(path: str | None, out: str, python: str, packages: str, plugin: str) -> None:
    """Write hooks.json, scripts, fragments and the engine's unit into a directory, and say where each belongs."""
    files = render_files(config.load(os.environ, path), python=python, packages=packages, plugin=plugin)
    for name, file in files.items():
        _write(os.path.join(out, name), file)
        click.echo(f"{os.path.join(out, name)} -> {file.target}")


@site.command()
@_SITE
@click.option("--root", default="/", type=click.Path(file_okay=False), help="Install below this, as for an image.")
@_PYTHON
@_PACKAGES
@_PLUGIN
@click.option("--force", is_flag=True, help="Replace files that somebody else wrote.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, write nothing.")
def install(path: str | None, root: str, python: str, packages: str, plugin: str, force: bool, dry_run: bool) -> None:
    """Write everything where it belongs on this host. slurm.conf and plugstack.conf themselves stay as they are.

    Nothing is written if one of the files is somebody else's.
    """
    files = render_files(config.load(os.environ, path), python=python, packages=packages, plugin=plugin)
    places = {os.path.join(root, file.target.lstrip("/")): file for file in files.values()}
    foreign = [f"{place} was not written by us" for place in places if not force and _foreign(place)]
    if foreign:
        raise ConfigError("nothing was written", mend="move them away, or say --force", faults=tuple(foreign))
    for place, file in places.items():
        same = _content(place) == file.text
        if not same and not dry_run:
            _write(place, file)
        click.echo(f"{place}: {'as it is' if same else 'would be written' if dry_run else 'written'}")
    click.echo(f"next: `include {_ETC}/slurm.conf` in slurm.conf, `include {_ETC}/plugstack.conf` in plugstack.conf,")
    click.echo("systemd-tmpfiles --create, scontrol reconfigure; then `slurm-resil doctor`")


def _content(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotPermittedError(f"cannot read {path}: {error.strerror}", path=path) from error


def _foreign(path: str) -> bool:
    text = _content(path)
    # hooks.json has no comments; the directory is ours
    return text is not None and _MARK not in text and not path.endswith(base.DEFAULT_CONFIG)


def _write(path: str, file: Rendered) -> None:
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        fsio.write_atomic(path, file.text.encode(), mode=file.mode)
    except OSError as error:
        raise NotPermittedError(
            f"cannot write {path}: {error.strerror}", mend="be root, or name another place"
        ) from error
