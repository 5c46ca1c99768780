"""The sandbox as an object: start, use, hurt and end a private Slurm cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_resil.core import fsio
from slurm_resil.core.errors import DataError, NotPermittedError, ServiceError, TryAgainError, UsageError
from slurm_resil.sandbox import conf, faults
from slurm_resil.sandbox.daemons import Daemons, find_tools, slurm_version
from slurm_resil.sandbox.hosts import Host, NamespaceHost, known_user
from slurm_resil.sandbox.procs import Proc, wait_gone, wait_until
from slurm_resil.sandbox.spec import CONTROLLER, MARKER, USERS, Layout, SandboxSpec
from slurm_resil.sandbox.teardown import finish, is_sandbox, locked, tear_down

_FORMAT = 1


class Sandbox:
    """One running sandbox.

    Attributes:
        spec: What was asked for.
        layout: Where everything lies.
        version: Slurm's version, such as (22, 5).
        version_text: As slurmctld says it.
    """

    def __init__(
        self,
        *,
        spec: SandboxSpec,
        host: NamespaceHost,
        at: conf.Endpoints,
        version: conf.Version,
        version_text: str,
        tools: Mapping[str, str],
    ) -> None:
        self.spec = spec
        self.layout = Layout(dir=spec.dir)
        self.version = version
        self.version_text = version_text
        self._host = host
        self._daemons = Daemons(host=host, spec=spec, layout=self.layout, at=at, tools=dict(tools))

    # -- life

    @classmethod
    def up(cls, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; returns when all its nodes are idle. On any failure nothing is left.

        Raises:
            ConfigError: The spec, this host or the given configuration cannot work.
            TryAgainError: The directory holds a sandbox already.
        """
        spec = spec.validated()
        tools = find_tools(accounting=spec.accounting, namespaces=True)
        version, version_text = slurm_version(tools["slurmctld"])
        layout = Layout(dir=spec.dir)
        _claim(layout)
        try:
            with locked(layout):
                try:
                    at = conf.Endpoints()
                    _prepare(spec, layout, at, version)
                    with NamespaceHost.make(layout) as host:
                        sandbox = cls(
                            spec=spec, host=host, at=at, version=version, version_text=version_text, tools=tools
                        )
                        sandbox._save(at, tools)
                        sandbox._start()
                except BaseException:
                    finish(layout)
                    raise
        except FileNotFoundError as error:
            raise ServiceError(f"the directory {layout.dir} was removed while the sandbox started") from error
        return sandbox

    def _start(self) -> None:
        daemons = self._daemons
        self._host.make_nodes(self.spec)
        daemons.munged()
        if self.spec.accounting:
            daemons.accounting()
        controller = daemons.slurmctld(first=True)
        nodes = {name: daemons.slurmd(name) for name in self.spec.node_names}
        daemons.wait_idle(controller, nodes)
        daemons.make_spares()

    def _save(self, at: conf.Endpoints, tools: Mapping[str, str]) -> None:
        spec = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in dataclasses.asdict(self.spec).items()
        }
        value = {
            "format": _FORMAT,
            "spec": spec,
            "endpoints": dataclasses.asdict(at),
            "version": list(self.version),
            "version_text": self.version_text,
            "tools": dict(tools),
        }
        fsio.write_json(self.layout.info, value, sync=False)

    @classmethod
    def attach(cls, path: Path | str) -> Sandbox:
        """Use a sandbox that runs.

        Raises:
            UsageError: There is none in this directory.
            TryAgainError: It is being started, or has crashed.
            NotPermittedError: It is another user's.
        """
        layout = Layout(dir=Path(path))
        if not is_sandbox(layout.dir):
            raise UsageError(f"there is no sandbox in {layout.dir}", mend="`slurm-resil sandbox up` starts one")
        if layout.dir.stat().st_uid != os.geteuid():
            raise NotPermittedError(f"the sandbox {layout.dir} belongs to uid {layout.dir.stat().st_uid}")
        mend = f"`slurm-resil sandbox down --dir {layout.dir}` clears it away"
        try:
            value = fsio.read_json(layout.info)
            spec = _spec_of(value["spec"])
            at = conf.Endpoints(**{**value["endpoints"], "node_ports": tuple(value["endpoints"]["node_ports"])})
            version = (int(value["version"][0]), int(value["version"][1]))
            tools = dict(value["tools"])
            text = str(value["version_text"])
        except (FileNotFoundError, DataError, KeyError, TypeError, ValueError) as error:
            raise TryAgainError(f"the sandbox {layout.dir} is only half started", mend=mend) from error
        keeper = Proc.load(layout.keeper)
        if keeper is None or not keeper.alive:
            raise TryAgainError(f"the sandbox {layout.dir} has crashed: its keeper is gone", mend=mend)
        host = NamespaceHost(layout=layout, keeper=keeper)
        return cls(spec=spec, host=host, at=at, version=version, version_text=text, tools=tools)

    def down(self) -> None:
        """End it; nothing is left."""
        tear_down(self.spec.dir)

    # -- use

    @property
    def pfs(self) -> Path:
        """The shared directory."""
        return self.layout.pfs

    @property
    def bb(self) -> Path:
        """The burst buffer's path on each node; from outside use :meth:`node_path`."""
        return self.layout.bb

    @property
    def slurm_conf(self) -> Path:
        """The sandbox's slurm.conf."""
        return self.layout.slurm_conf

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes."""
        return self.spec.node_names

    @property
    def users(self) -> tuple[str, ...]:
        """Who can use it; the first one is the usual one."""
        return (*(user.name for user in USERS), "root")

    @property
    def lost(self) -> tuple[str, ...]:
        """What this sandbox cannot do because it runs without root."""
        return ()

    def command(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        node: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> tuple[list[str], dict[str, str], str | None]:
        """Arguments, environment and directory to give to ``subprocess``, so that ``argv`` runs in the sandbox.

        Raises:
            UsageError: No such user or node.
            TryAgainError: The node is dead.
        """
        where = str(cwd) if cwd is not None else None
        return self._host.command(argv, user=known_user(user), node=node, env=env or {}, cwd=where)

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        node: str | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, or inside ``node``, as ``user`` in its home directory.

        Raises:
            subprocess.CalledProcessError: It failed, with ``check``; ``output`` and ``stderr`` hold what it said.
            subprocess.TimeoutExpired: It took too long and was killed.
        """
        command, full_env, directory = self.command(argv, user=user, node=node, env=env, cwd=cwd)
        done = subprocess.run(
            command,
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=full_env,
            cwd=directory,
            check=False,
        )
        result = subprocess.CompletedProcess(list(argv), done.returncode, done.stdout, done.stderr)
        if check and done.returncode != 0:
            error = subprocess.CalledProcessError(done.returncode, list(argv), done.stdout, done.stderr)
            error.add_note(f"stdout: {done.stdout[-2000:]}\nstderr: {done.stderr[-2000:]}")
            raise error
        return result

    def node_path(self, node: str, path: Path | str) -> Path:
        """A path inside the node's namespaces as seen from here: its burst buffer, its ``/dev/shm``."""
        return self._host.root_of(node) / str(path).lstrip("/")

    def node_states(self) -> dict[str, str]:
        """Slurm's state of each node, such as ``idle`` or ``down*``; empty if slurmctld does not answer."""
        return self._daemons.node_states()

    def wait_node(self, node: str, *states: str, timeout_s: float = 60.0) -> str:
        """Wait until Slurm gives the node one of these states (``*`` and other marks do not count).

        Raises:
            ServiceError: It did not in time.
        """

        def reached() -> str:
            state = self.node_states().get(node, "")
            return state if state.rstrip("*~#!%$@^-+") in states else ""

        return wait_until(f"node {node} {' or '.join(states)}", reached, timeout_s=timeout_s, poll_s=0.2)

    # -- faults

    def node_kill(self, node: str) -> None:
        """SIGKILL everything of a node; its burst buffer stays, as on a disk."""
        self._check(node)
        with locked(self.layout):
            faults.kill(self._host, node)

    def node_cut(self, node: str) -> None:
        """Take the node's link down."""
        with locked(self.layout):
            self._host.set_link(self._index(node), up=False)

    def node_heal(self, node: str) -> None:
        """Take the node's link up."""
        with locked(self.layout):
            self._host.set_link(self._index(node), up=True)

    def node_wipe(self, node: str) -> None:
        """Empty the node's burst buffer and ``/dev/shm``."""
        self._check(node)
        with locked(self.layout):
            faults.wipe(self._host, self.layout, node)

    def node_restore(self, node: str, *, resume: bool = False, timeout_s: float = 60.0) -> None:
        """Heal the link and start the node if it is dead; returns when Slurm calls it usable.

        Args:
            node: Its name.
            resume: Also take it out of DOWN or DRAIN.
            timeout_s: How long Slurm may take.

        Raises:
            ServiceError: Slurm took longer.
        """
        index = self._index(node)
        with locked(self.layout):
            self._host.set_link(index, up=True)
            if not faults.alive(self.layout, node):
                self._daemons.slurmd(node)
        end = time.monotonic() + timeout_s
        good = ("idle", "reserved", "allocated", "mixed", "completing")

        def usable() -> str:
            state = self.node_states().get(node, "")
            plain = state.rstrip("*~#!%$@^-+")
            if "*" not in state and plain in good:
                return state
            if resume and "*" not in state and plain in ("down", "drained", "draining"):
                self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)
            return ""

        wait_until(f"node {node} usable again", usable, timeout_s=max(1.0, end - time.monotonic()), poll_s=0.2)

    def kill_slurmctld(self) -> None:
        """SIGKILL slurmctld."""
        proc = Proc.load(self.layout.procs / "slurmctld.json")
        if proc is not None and proc.alive:
            proc.kill()
            wait_gone([proc])

    def restart_slurmctld(self, *, timeout_s: float = 30.0) -> None:
        """Start slurmctld, after killing the one that runs; returns when it answers."""
        with locked(self.layout):
            self.kill_slurmctld()
            self._daemons.slurmctld()
        wait_until("an answer of slurmctld", self.node_states, timeout_s=timeout_s, poll_s=0.1)

    def _index(self, node: str) -> int:
        self._check(node)
        return self.spec.node_names.index(node) + 1

    def _check(self, node: str) -> None:
        if node not in self.spec.node_names:
            raise UsageError(f"there is no node {node!r}; the nodes are {', '.join(self.spec.node_names)}", node=node)

    # -- look

    def status(self) -> dict[str, Any]:
        """Everything about it, as ``status --json`` prints it."""
        return faults.status(self)


def _claim(layout: Layout) -> None:
    """Make the directory ours, or take an empty one of ours.

    Raises:
        TryAgainError: There is a sandbox in it already.
        UsageError: It holds other things, or is not ours.
    """
    with contextlib.suppress(FileExistsError):
        layout.dir.mkdir(mode=0o755)
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


def _prepare(spec: SandboxSpec, layout: Layout, at: conf.Endpoints, version: conf.Version) -> None:
    """Write the directory's content."""
    for path in (layout.etc, layout.log, layout.run, layout.state, layout.spool, layout.home, layout.pfs, layout.bb):
        path.mkdir(mode=0o755)
    layout.procs.mkdir(mode=0o700)
    for name in spec.node_names:
        (layout.spool / name).mkdir(mode=0o755)
    (layout.state / "slurmctld").mkdir(mode=0o700)
    layout.pfs.chmod(0o1777)
    for user in USERS if at.private else ():
        for path, mode in ((layout.home / user.name, 0o700), (layout.pfs / user.name, 0o755)):
            path.mkdir(mode=mode)
            os.chown(path, user.uid, user.uid)
    plugins = []
    for entry in spec.spank:
        file, *arguments = entry.split()
        copy = layout.etc / os.path.basename(file)
        shutil.copyfile(file, copy)
        copy.chmod(0o755)
        plugins.append(" ".join((str(copy), *arguments)))
    files = {
        "slurm.conf": conf.slurm_conf(spec, layout, at, version),
        "cgroup.conf": conf.cgroup_conf(version),
        "plugstack.conf": conf.plugstack_conf(tuple(plugins)),
        "passwd": conf.passwd(Path("/etc/passwd").read_text(encoding="utf-8"), layout),
        "group": conf.group(Path("/etc/group").read_text(encoding="utf-8")),
        "hosts": conf.hosts(spec),
    }
    if spec.slurm_conf_extra is not None:
        files["extra.conf"] = spec.slurm_conf_extra.read_text(encoding="utf-8")
    for name, text in files.items():
        fsio.write_atomic(layout.etc / name, text.encode(), sync=False)


def _spec_of(value: Mapping[str, Any]) -> SandboxSpec:
    paths = ("dir", "prolog", "epilog", "slurm_conf_extra")
    known = {item.name for item in dataclasses.fields(SandboxSpec)}
    fields = {key: item for key, item in value.items() if key in known}
    for name in paths:
        if fields.get(name) is not None:
            fields[name] = Path(fields[name])
    return SandboxSpec(**{**fields, "spank": tuple(fields["spank"])})


__all__ = ["CONTROLLER", "Host", "Sandbox"]
