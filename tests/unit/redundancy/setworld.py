"""Nodes with shards that protect each other, threads as movers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
from shardworld import ITERATION, Local, World, build

from slurm_resil.comm import local
from slurm_resil.core.schemes import Scheme
from slurm_resil.redundancy import encode, rebuild


def world(root: Path, ranks: int, *, per_node: int = 1, uneven: bool = True) -> World:
    """Shards of every kind of item; with sizes that differ from rank to rank."""
    made = build(root, ranks=ranks, per_node=per_node, scale=20)
    rng = np.random.default_rng(1)
    for rank, state in enumerate(made.states):
        if uneven:
            data = np.frombuffer(rng.bytes(3000 * rank * rank), np.uint8)
            state["private/part"] = Local(data, "private")
    made.seal()
    return made


def environment(world: World, rank: int) -> dict[str, str]:
    return {"SLURMD_NODENAME": f"node{rank}"}


def protect(world: World, scheme: str, *, iteration: int | None = None, nodes: int = 0, **options) -> encode.Outcome:
    stop = options.pop("stop", lambda: False)

    def one(comm):
        return encode.encode(
            comm,
            run_dir=world.run_dir,
            job_dir=world.job_dir(comm.rank),
            iteration=iteration,
            options=encode.Options(scheme=Scheme.parse(scheme), **{"set_size": 128, **options}),
            env=environment(world, comm.rank),
            stop=stop,
        )

    outcomes = local.run(nodes or world.nodes, one)
    assert len({o.iteration for o in outcomes}) == 1
    return outcomes[0]


def restore(
    world: World, *, iteration: int | None = None, names: str = "node", nodes: int = 0, **more
) -> rebuild.Outcome:
    def one(comm):
        return rebuild.rebuild(
            comm,
            run_dir=world.run_dir,
            job_dir=world.job_dir(comm.rank),
            iteration=iteration,
            env={"SLURMD_NODENAME": f"{names}{comm.rank}"},
            **more,
        )

    outcomes = local.run(nodes or world.nodes, one)
    assert len({(o.iteration, o.nodes, o.passed_over) for o in outcomes}) == 1
    return outcomes[0]


def wipe(world: World, *nodes: int) -> None:
    for node in nodes:
        shutil.rmtree(world.job_dir(node))


def snapshot(world: World) -> dict[str, bytes]:
    """All files of all nodes but pins; of the manifests of members only the names: they have times."""
    found = {}
    for node in range(world.nodes):
        for base, _, names in os.walk(world.job_dir(node)):
            for name in names:
                path = os.path.join(base, name)
                if os.path.basename(base) != "pins":
                    timed = os.path.basename(base) == "redundancy" and name.endswith(".json")
                    found[path] = b"" if timed else Path(path).read_bytes()
    return found


def members(world: World, iteration: int = ITERATION) -> list[str]:
    """Published manifests of members."""
    return [path for path in snapshot(world) if f"/redundancy/{iteration:010d}-" in path and path.endswith(".json")]
