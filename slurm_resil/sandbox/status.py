"""What a sandbox looks like, for ``status``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_resil.sandbox.hosts import Host
from slurm_resil.sandbox.procs import Proc
from slurm_resil.sandbox.spec import Layout, SandboxSpec, node_address

_DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld")


def describe(host: Host, spec: SandboxSpec, version_text: str, states: Mapping[str, str]) -> dict[str, Any]:
    """Describe a sandbox: nodes, daemons, paths; pids are those of this host.

    Args:
        host: Where its processes run.
        spec: What was asked for.
        version_text: As slurmctld tells it.
        states: Slurm's state of each node.
    """
    layout = Layout(dir=spec.dir)
    links = host.link_states(spec)
    nodes = []
    for index, name in enumerate(spec.node_names, start=1):
        first = Proc.load(layout.procs / f"{name}.json")
        alive = first is not None and first.alive
        nodes.append(
            {
                "name": name,
                "address": "127.0.0.1" if spec.rootless else node_address(index),
                "state": states.get(name, "unknown"),
                "link": links[name],
                "alive": alive,
                "spare": name in spec.spare_names,
                "pid": first.pid if first is not None and alive else None,
            }
        )
    daemons = {}
    for name in _DAEMONS:
        proc = Proc.load(layout.procs / f"{name}.json")
        if proc is not None:
            daemons[name] = {"pid": proc.pid, "alive": proc.alive}
    return {
        "dir": str(layout.dir),
        "mode": host.mode,
        "lost": list(host.lost),
        "users": list(host.users),
        "slurm_version": version_text,
        "slurm_conf": str(layout.slurm_conf),
        "pfs": str(layout.pfs),
        "bb": str(layout.bb),
        "log": str(layout.log),
        "partitions": ["train", "urgent"],
        "accounting": spec.accounting,
        "keeper_pid": host.keeper_pid,
        "daemons": daemons,
        "nodes": nodes,
    }
