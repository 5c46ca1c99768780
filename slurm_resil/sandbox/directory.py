"""The sandbox's directory: made, filled with configuration, and recorded so that later commands know it."""

from __future__ import annotations

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from slurm_resil.core import fsio
from slurm_resil.core.errors import DataError, NotPermittedError, TryAgainError, UsageError
from slurm_resil.sandbox import conf
from slurm_resil.sandbox.spec import MARKER, USERS, Layout, SandboxSpec
from slurm_resil.sandbox.teardown import is_sandbox

_PATHS = ("dir", "prolog", "epilog", "slurm_conf_extra", "topology")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was asked for, and what was found when it started.

    Attributes:
        spec: What was asked for.
        at: Addresses, ports, user.
        version: Slurm's version, such as (22, 5).
        version_text: As slurmctld says it.
        tools: Absolute path of each program, by its name.
    """

    spec: SandboxSpec
    at: conf.Endpoints
    version: conf.Version
    version_text: str
    tools: dict[str, str]


def claim(layout: Layout) -> None:
    """Make the directory a sandbox's; an empty one of ours will do.

    Raises:
        NotPermittedError: It is another user's.
        TryAgainError: There is a sandbox in it already.
        UsageError: It cannot be made, holds other things, or is not ours.
    """
    try:
        layout.dir.mkdir(mode=0o755)
    except FileExistsError:
        pass
    except PermissionError as error:
        raise NotPermittedError(
            f"cannot make {layout.dir}: {error.strerror}", mend="--dir names another place"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot make {layout.dir}: {error.strerror}", mend="--dir names another place") from error
    info = os.lstat(layout.dir)
    if not layout.dir.is_dir() or layout.dir.is_symlink():
        raise UsageError(f"{layout.dir} is not a directory")
    if is_sandbox(layout.dir):
        raise TryAgainError(
            f"there is a sandbox in {layout.dir} already",
            mend=f"`slurm-resil sandbox down --dir {layout.dir}` ends it; --dir names another place",
        )
    if info.st_uid != os.geteuid():
        raise NotPermittedError(f"{layout.dir} belongs to uid {info.st_uid}")
    if os.listdir(layout.dir):
        raise UsageError(f"{layout.dir} is not empty and not a sandbox's: it is left as it is")
    layout.dir.chmod(0o755)
    try:
        os.close(os.open(layout.marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    except FileExistsError as error:
        raise TryAgainError(f"another command starts a sandbox in {layout.dir} right now ({MARKER})") from error


def fill(layout: Layout, record: Record) -> None:
    """Make the directories and write the configuration, and the record last."""
    spec, at, version = record.spec, record.at, record.version
    for path in (layout.etc, layout.log, layout.run, layout.state, layout.spool, layout.home, layout.pfs, layout.bb):
        path.mkdir(mode=0o755)
    layout.procs.mkdir(mode=0o700)
    for name in spec.node_names:
        (layout.spool / name).mkdir(mode=0o755)
    (layout.state / "slurmctld").mkdir(mode=0o700)
    layout.pfs.chmod(0o1777)
    if not at.private:
        (layout.home / at.user).mkdir(mode=0o700)
    for user in USERS if at.private else ():
        for path, mode in ((layout.home / user.name, 0o700), (layout.pfs / user.name, 0o755)):
            path.mkdir(mode=mode)
            os.chown(path, user.uid, user.uid)
    plugins = []
    for entry in spec.spank:
        file, *arguments = entry.split()
        copy = layout.etc / "spank" / os.path.basename(file)  # a copy: users may not reach the original
        copy.parent.mkdir(mode=0o755, exist_ok=True)
        shutil.copyfile(file, copy)
        copy.chmod(0o755)
        plugins.append(" ".join((str(copy), *arguments)))
    extra = spec.slurm_conf_extra.read_text(encoding="utf-8") if spec.slurm_conf_extra is not None else ""
    topology = {"topology.conf": spec.topology.read_text(encoding="utf-8")} if spec.topology is not None else {}
    files = {
        **topology,
        "slurm.conf": conf.slurm_conf(spec, layout, at, version, extra, topology.get("topology.conf", "")),
        "cgroup.conf": conf.cgroup_conf(version),
        "plugstack.conf": conf.plugstack_conf(tuple(plugins)),
        "passwd": conf.passwd(Path("/etc/passwd").read_text(encoding="utf-8"), layout),
        "group": conf.group(Path("/etc/group").read_text(encoding="utf-8")),
        "hosts": conf.hosts(spec),
    }
    for name, text in files.items():
        fsio.write_atomic(layout.etc / name, text.encode(), sync=False)
    value = dataclasses.asdict(record)
    value["spec"] |= {name: str(value["spec"][name]) for name in _PATHS if value["spec"][name] is not None}
    fsio.write_json(layout.info, value, sync=False)


def load(layout: Layout) -> Record:
    """Read the record back.

    Raises:
        FileNotFoundError: There is none yet.
        DataError: It is torn, or from another version of this program.
    """
    value = fsio.read_json(layout.info, limit_bytes=1 << 20)
    try:
        fields = dict(value["spec"])
        for name in _PATHS:
            fields[name] = Path(fields[name]) if fields[name] is not None else None
        ports = tuple(value["at"]["node_ports"])
        return Record(
            spec=SandboxSpec(**{**fields, "spank": tuple(fields["spank"])}),
            at=conf.Endpoints(**{**value["at"], "node_ports": ports}),
            version=(int(value["version"][0]), int(value["version"][1])),
            version_text=str(value["version_text"]),
            tools=dict(value["tools"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{layout.info} is not a record that this version reads: {error}") from error
