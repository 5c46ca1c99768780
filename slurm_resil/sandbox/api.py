"""The sandbox as an object: start, use, hurt and end a private Slurm cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_resil.core.errors import DataError, NotPermittedError, TryAgainError, UsageError
from slurm_resil.sandbox import conf, plainhost
from slurm_resil.sandbox.daemons import Daemons, find_tools, slurm_version
from slurm_resil.sandbox.directory import Record, claim, fill, load
from slurm_resil.sandbox.hosts import Command, Host
from slurm_resil.sandbox.nshost import NamespaceHost
from slurm_resil.sandbox.procs import Proc, wait_gone, wait_until
from slurm_resil.sandbox.spec import Layout, SandboxSpec
from slurm_resil.sandbox.status import describe
from slurm_resil.sandbox.teardown import finish, is_sandbox, locked, tear_down


class Sandbox:
    """One running sandbox.

    Attributes:
        spec: What was asked for.
        host: Where its processes run.
        layout: Where everything lies.
        version: Slurm's version, such as (22, 5).
        version_text: As slurmctld says it.
    """

    def __init__(self, record: Record, host: Host) -> None:
        self.spec = record.spec
        self.layout = Layout(dir=record.spec.dir)
        self.version = record.version
        self.version_text = record.version_text
        self.host = host
        self._daemons = Daemons(host=host, spec=self.spec, layout=self.layout, at=record.at, tools=record.tools)

    # -- life

    @classmethod
    def up(cls, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; returns when all its nodes are idle. On any failure nothing is left.

        Raises:
            ConfigError: The spec, this host or the given configuration cannot work.
            TryAgainError: The directory holds a sandbox already.
        """
        spec = dataclasses.replace(spec, rootless=spec.rootless or os.geteuid() != 0).validated()
        tools = find_tools(accounting=spec.accounting, namespaces=not spec.rootless)
        version, version_text = slurm_version(tools["slurmctld"])
        layout = Layout(dir=spec.dir)
        claim(layout)
        with locked(layout):
            try:
                at = plainhost.endpoints(spec, layout) if spec.rootless else conf.Endpoints()
                record = Record(spec=spec, at=at, version=version, version_text=version_text, tools=tools)
                fill(layout, record)
                with _host(record) as host:
                    sandbox = cls(record, host)
                    sandbox._start()
            except BaseException:
                finish(layout)
                raise
        return sandbox

    def _start(self) -> None:
        daemons = self._daemons
        self.host.make_nodes(self.spec)
        daemons.munged()
        if self.spec.accounting:
            daemons.accounting()
        controller = daemons.slurmctld(first=True)
        nodes = {name: daemons.slurmd(name) for name in self.spec.node_names}
        daemons.make_spares(controller)
        daemons.wait_idle(controller, nodes)

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
            record = load(layout)
        except (OSError, DataError) as error:
            raise TryAgainError(f"the sandbox {layout.dir} is only half started", mend=mend) from error
        host: Host = plainhost.PlainHost(layout=layout, at=record.at)
        if not record.spec.rootless:
            keeper = Proc.load(layout.keeper)
            if keeper is None or not keeper.alive:
                raise TryAgainError(f"the sandbox {layout.dir} has crashed: its keeper is gone", mend=mend)
            host = NamespaceHost(layout=layout, keeper=keeper)
        return cls(record, host)

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
        return self.host.users

    @property
    def lost(self) -> tuple[str, ...]:
        """What this sandbox cannot do because it runs without root."""
        return self.host.lost

    def command(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        node: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> Command:
        """What to give to ``subprocess``, so that ``argv`` runs in the sandbox.

        Raises:
            UsageError: No such user or node.
            TryAgainError: The node is dead.
        """
        where = str(cwd) if cwd is not None else None
        return self.host.command(argv, user=user or self.users[-1], node=node, env=env or {}, cwd=where)

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        node: str | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, or inside ``node``, as ``user`` (default: root) in its home directory.

        Raises:
            subprocess.CalledProcessError: It failed, with ``check``; ``output`` and ``stderr`` hold what it said.
            subprocess.TimeoutExpired: It took too long and was killed.
        """
        command = self.command(argv, user=user, node=node, env=env, cwd=cwd)
        done = subprocess.run(
            command.argv,
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=command.env,
            cwd=command.cwd,
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
        return self.host.node_path(node, str(path))

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
            self.host.kill_node(node)

    def node_cut(self, node: str) -> None:
        """Take the node's link down."""
        with locked(self.layout):
            self.host.set_link(self._index(node), up=False)

    def node_heal(self, node: str) -> None:
        """Take the node's link up."""
        with locked(self.layout):
            self.host.set_link(self._index(node), up=True)

    def node_wipe(self, node: str) -> None:
        """Empty the node's burst buffer and ``/dev/shm``."""
        self._check(node)
        with locked(self.layout):
            self.host.wipe(node)

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
            self.host.set_link(index, up=True)
            since_s = 0.0
            if not self.node_alive(node):
                since_s = time.time()
                self._daemons.slurmd(node)
        end = time.monotonic() + timeout_s
        good = ("idle", "reserved", "allocated", "mixed", "completing")
        # slurmctld looks after a node that it has given up about once a minute, and after all of them when it reads its
        # configuration again; from 23.11 on that starts the daemons anew, which are ours to start
        ask = self.version < (23, 11)

        def usable() -> str:
            nonlocal ask
            if not self._daemons.registered_since(node, since_s):
                return ""
            state = self.node_states().get(node, "")
            plain = state.rstrip("*~#!%$@^-+")
            if "*" not in state and plain in good:
                return state
            if ask and state.startswith("down*"):
                ask = self.run(["scontrol", "reconfigure"], check=False).returncode != 0
            if resume and "*" not in state and plain in ("down", "drained", "draining"):
                self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)
            return ""

        wait_until(f"node {node} usable again", usable, timeout_s=max(1.0, end - time.monotonic()), poll_s=0.2)

    def node_alive(self, node: str) -> bool:
        """Whether the node's first process runs."""
        self._check(node)
        proc = Proc.load(self.layout.procs / f"{node}.json")
        return proc is not None and proc.alive

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
        return describe(self.host, self.spec, self.version_text, self.node_states())


def _host(record: Record) -> contextlib.AbstractContextManager[NamespaceHost | plainhost.PlainHost]:
    layout = Layout(dir=record.spec.dir)
    if record.spec.rootless:
        return contextlib.nullcontext(plainhost.PlainHost(layout=layout, at=record.at))
    return NamespaceHost.make(layout)
