"""Where a process is in its run: from the launcher's variables, torchrun's, Slurm's, or none of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_resil.core import config, ids, paths
from slurm_resil.core.errors import ConfigError
from slurm_resil.core.model import RunInfo
from slurm_resil.core.settings import SLOTS, Settings

_TASKS = re.compile(r"^(\d+)(?:\(x\d+\))?$")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What the environment says.

    Attributes:
        info: Run.
        rank: Global rank.
        local_rank: Rank on this node.
        node: Name of the node.
        node_rank: Its place.
        ranks_per_node: Ranks of each node.
        job_dir: Job's directory in the burst buffer.
        run_dir: Run's directory on the parallel file system.
        leader: ``host:port`` of the launcher's leader, None where there is no launcher.
        every: Checkpoint every so many iterations, None if nothing is said.
        interval_s: Checkpoint every so many seconds, None if nothing is said.
        slots: Slots of each rank.
    """

    info: RunInfo
    rank: int
    local_rank: int
    node: str
    node_rank: int
    ranks_per_node: int
    job_dir: str
    run_dir: str
    leader: str | None
    every: int | None
    interval_s: float | None
    slots: int = SLOTS


class _Env:
    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.faults: list[str] = []

    def text(self, *names: str) -> str | None:
        return next((self._env[name] for name in names if self._env.get(name)), None)

    def number(self, *names: str, least: int = 0) -> int | None:
        for name in names:
            value = self._env.get(name)
            if not value:
                continue
            if value.isdecimal() and int(value) >= least:
                return int(value)
            self.faults.append(f"{name}={value!r} is not a whole number from {least}, as in {name}={max(1, least)}")
        return None


def from_env(env: Mapping[str, str]) -> Place:
    """Read the environment of a rank or an agent.

    Raises:
        ConfigError: Variables that make no sense, all of them at once.
    """
    read = _Env(env)
    in_step = bool(env.get("SLURM_STEP_ID"))  # in the batch script itself PROCID and NTASKS mean something else
    slurm = (lambda name: (name,)) if in_step else (lambda name: ())
    job = read.number("SLURM_JOB_ID", "SLURM_JOBID")
    world = read.number("WORLD_SIZE", "SLURM_RESIL_WORLD_SIZE", *slurm("SLURM_NTASKS"), least=1) or 1
    rank = read.number("RANK", *slurm("SLURM_PROCID")) or 0
    local_rank = read.number("LOCAL_RANK", *slurm("SLURM_LOCALID")) or 0
    per_node = read.number("SLURM_RESIL_RANKS_PER_NODE", "LOCAL_WORLD_SIZE", least=1)
    if per_node is None and in_step:
        tasks = _TASKS.match(env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "")))
        if tasks is None:
            read.faults.append(
                f"SLURM_TASKS_PER_NODE={env.get('SLURM_TASKS_PER_NODE')!r}: nodes need equally many ranks"
            )
        else:
            per_node = int(tasks[1])
    per_node = per_node or world
    node_rank = read.number("SLURM_RESIL_NODE_RANK", "GROUP_RANK", *slurm("SLURM_NODEID"))
    node_rank = rank // per_node if node_rank is None else node_rank
    run_id = read.text("SLURM_RESIL_RUN_ID") or (str(job) if job is not None else None)
    if run_id is None:
        # outside Slurm and without a name: ranks of one node have one parent, a lone process has itself
        run_id = ids.process_name(os.getppid() if per_node > 1 else os.getpid())
    if "/" in run_id or run_id in (".", "..") or len(run_id.encode()) > paths.RUN_ID_BYTES:
        read.faults.append(f"SLURM_RESIL_RUN_ID={run_id!r} is no name, as in SLURM_RESIL_RUN_ID=llama-3")
    settings = None
    try:
        settings = Settings.from_env(env, config.load(env))
    except ConfigError as error:
        read.faults += error.faults or (str(error),)
    if world % per_node or rank >= world or (rank != node_rank * per_node + local_rank and "RANK" in env):
        read.faults.append(
            f"rank {rank} of {world} is not local rank {local_rank} of {per_node} on node {node_rank}: "
            "nodes need equally many ranks, in the order of the nodes"
        )
    if read.faults or settings is None:
        raise ConfigError("the environment makes no sense", faults=tuple(read.faults))
    job_id = job if job is not None else paths.local_job(settings.prefix_root.value, run_id)
    return Place(
        info=RunInfo(
            run_id=run_id,
            job_id=job_id,
            attempt=read.number("SLURM_RESIL_ATTEMPT", "SLURM_RESTART_COUNT") or 0,
            cycle=read.number("SLURM_RESIL_CYCLE", "TORCHELASTIC_RESTART_COUNT") or 0,
            world_size=world,
            nodes=world // per_node,
        ),
        rank=rank,
        local_rank=local_rank,
        node=read.text("SLURMD_NODENAME") or os.uname().nodename,
        node_rank=node_rank,
        ranks_per_node=per_node,
        job_dir=paths.job_dir(settings.bb_root.value, job_id),
        run_dir=paths.run_dir(settings.prefix_root.value, run_id),
        leader=read.text("SLURM_RESIL_LEADER"),
        every=settings.every.value,
        interval_s=settings.interval_s.value,
        slots=read.number("SLURM_RESIL_SLOT_COUNT", least=2) or settings.slot_count,
    )
