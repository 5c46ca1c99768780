"""``slurm-resil agent``: the agent of this node, started by the launcher or by a rank."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace

import click

from slurm_resil.agent.agent import main_agent
from slurm_resil.agent.place import Place, from_env
from slurm_resil.agent.setup import AgentConfig
from slurm_resil.agent.store import Store
from slurm_resil.core import log
from slurm_resil.core.errors import ConfigError, UsageError
from slurm_resil.format.manifest import ShardManifest
from slurm_resil.launch.rank import LAYOUT, read_layout


class BurstBuffer:
    """The real store: the node's catalog, and the seal of :mod:`slurm_resil.ckpt`."""

    def __init__(self, job_dir: str, node_rank: int = 0) -> None:
        from slurm_resil.catalog import LocalCatalog

        self._job_dir, self._node_rank = job_dir, node_rank
        self._catalog = LocalCatalog(job_dir)

    def sealed(self) -> Mapping[int, Mapping[int, str]]:
        """See Store."""
        return self._catalog.sealed()

    def seal(self, draft: ShardManifest) -> ShardManifest:
        """See Store."""
        from slurm_resil.ckpt.seal import seal

        return seal(self._job_dir, draft)

    def prepare(self, rank: int, index: int, slots: int, layout: str) -> bool:
        """See Store."""
        from slurm_resil.ckpt.slotfile import SlotFiles, Wanted

        wanted = Wanted.read(self._job_dir, rank)
        if (wanted.rank, wanted.digest) != (rank, layout):
            return False
        files = SlotFiles(self._job_dir, rank, slots)
        if not files.fits(index, wanted):
            files.create(index, wanted)[1].close()
        return True

    def quarantine(self, iteration: int, rank: int, reason: str) -> str | None:
        """See Store."""
        return self._catalog.quarantine(iteration, rank, reason)

    def encoded(self) -> set[int]:
        """See Store."""
        return self._catalog.encoded(self._node_rank)

    def forget(self, iteration: int) -> None:
        """See Store."""
        self._catalog.forget(iteration)


def placed(env: Mapping[str, str]) -> tuple[Place, tuple[str, ...]]:
    """Find this agent's place: in the launcher's layout, by the name of the node, or from the environment alone.

    Returns:
        The place, and the names of all nodes by node_rank (empty names where there is no layout).

    Raises:
        ConfigError: The environment makes no sense, or this node has no place.
    """
    place = from_env(env)
    if LAYOUT not in env:
        return place, ("",) * place.info.nodes
    nodes = tuple(read_layout(env[LAYOUT]))
    if place.node not in nodes:
        raise ConfigError(f"node {place.node} has no place among {', '.join(nodes)}", node=place.node)
    return replace(place, node_rank=nodes.index(place.node)), nodes


def config(place: Place, env: Mapping[str, str], nodes: tuple[str, ...] = ()) -> AgentConfig:
    """Build the agent's configuration from its place.

    Raises:
        ConfigError: The run's directory cannot be made.
    """
    try:
        os.makedirs(place.run_dir, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the run's directory {place.run_dir}: {error.strerror}",
            mend="make the prefix writable, or set SLURM_RESIL_PREFIX to a directory that is",
            path=place.run_dir,
        ) from error
    return AgentConfig(
        info=place.info,
        node=place.node,
        node_rank=place.node_rank,
        nodes=nodes or ("",) * place.info.nodes,
        ranks_per_node=place.ranks_per_node,
        job_dir=place.job_dir,
        run_dir=place.run_dir,
        leader=place.leader,
        host=own_address(env) if place.leader is None and place.info.nodes > 1 else None,
        slots=place.slots,
        interval_s=place.interval_s,
    )


def own_address(env: Mapping[str, str]) -> str:
    """Address of this node that other nodes of the job reach: the one that Slurm's packets leave from.

    Raises:
        ConfigError: None is found.
    """
    for peer in (env.get("SLURM_LAUNCH_NODE_IPADDR"), env.get("MASTER_ADDR")):
        if not peer:
            continue
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((peer, 9))  # sends nothing: it asks for the route
                address = str(probe.getsockname()[0])
        except OSError:
            continue
        if not address.startswith("127."):
            return address
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127."
    if address.startswith("127."):
        raise ConfigError(
            "no address of this node is found that other nodes could reach", mend="start with `slurm-resil run`"
        )
    return address


@click.group(invoke_without_command=True)
@click.pass_context
def agent(context: click.Context) -> None:
    """The agent of a node: started by `slurm-resil run`, or by a rank where there is no launcher."""
    if context.invoked_subcommand is None:
        raise UsageError(
            "the agent is not started by hand", mend="`slurm-resil run -- COMMAND` starts one on each node"
        )


@agent.command()
def serve() -> None:
    """Serve the ranks of this node. Everything comes from the environment, see the launcher."""
    log.configure()
    place, nodes = placed(os.environ)
    store: Store = BurstBuffer(place.job_dir, place.node_rank)
    sys.exit(main_agent(config(place, os.environ, nodes), store))
