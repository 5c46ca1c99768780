"""What can befall a node, and what a sandbox looks like."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from slurm_resil.core import fsio
from slurm_resil.sandbox.hosts import NamespaceHost
from slurm_resil.sandbox.procs import Proc, wait_gone
from slurm_resil.sandbox.spec import Layout, node_address

if TYPE_CHECKING:
    from slurm_resil.sandbox.api import Sandbox


def alive(layout: Layout, node: str) -> bool:
    """Whether the node's pid 1 runs."""
    init = Proc.load(layout.procs / f"{node}.json")
    return init is not None and init.alive


def kill(host: NamespaceHost, node: str) -> None:
    """SIGKILL the node's pid 1; the kernel kills the rest of its PID namespace before it is gone."""
    init = Proc.load(host.layout.procs / f"{node}.json")
    if init is not None and init.alive:
        init.kill()
        wait_gone([init])


def wipe(host: NamespaceHost, layout: Layout, node: str) -> None:
    """Empty the burst buffer and ``/dev/shm`` of a node, running or not."""
    for path in (str(layout.bb), "/dev/shm"):  # noqa: S108 - the node's own
        with fsio.open_dir(host.root_of(node) / path.lstrip("/")) as fd:
            for name in os.listdir(fd):
                fsio.rmtree_at(fd, name)


def status(sandbox: Sandbox) -> dict[str, Any]:
    """Describe a sandbox: nodes, daemons, paths."""
    layout, spec = sandbox.layout, sandbox.spec
    host = sandbox._host
    states = sandbox.node_states()
    links = host.link_states(spec)
    nodes = []
    for index, name in enumerate(spec.node_names, start=1):
        init = Proc.load(layout.procs / f"{name}.json")
        living = init is not None and init.alive
        nodes.append(
            {
                "name": name,
                "address": node_address(index),
                "state": states.get(name, "unknown"),
                "link": links[name],
                "alive": living,
                "spare": name in spec.spare_names,
                "pid": init.pid if init is not None and living else None,
                "holder_pid": host.holder(name).pid,
            }
        )
    daemons = {}
    for name in ("munged", "mariadbd", "slurmdbd", "slurmctld"):
        proc = Proc.load(layout.procs / f"{name}.json")
        if proc is not None:
            daemons[name] = {"pid": proc.pid, "alive": proc.alive}
    return {
        "dir": str(layout.dir),
        "mode": "namespaces",
        "slurm_version": sandbox.version_text,
        "slurm_conf": str(layout.slurm_conf),
        "pfs": str(layout.pfs),
        "bb": str(layout.bb),
        "log": str(layout.log),
        "partitions": ["train", "urgent"],
        "accounting": spec.accounting,
        "keeper_pid": host.keeper.pid,
        "daemons": daemons,
        "nodes": nodes,
    }
