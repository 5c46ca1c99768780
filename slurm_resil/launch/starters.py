"""Starts agents, ranks, movers and marks: by srun on the nodes of a job, or as processes of this host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import IO, Protocol

from slurm_resil.launch import commands
from slurm_resil.launch.cluster import Cluster
from slurm_resil.launch.commands import Command, Job, Move
from slurm_resil.launch.mark import write as write_mark
from slurm_resil.launch.rank import LOCAL_RANK
from slurm_resil.launch.steps import LocalRanks, Process, Ranks, SlurmKill, Step
from slurm_resil.launch.verdict import Verdict

MARK_S = 10.0
TELL_S = 3.0  # from a mover that exited with a code to killing the others: they were told, and end with the same one

AgentsEnded = Callable[[int, Sequence[str]], None]
MoverEnded = Callable[[int, Sequence[str], float], None]
MoverSaid = Callable[[str], None]


class Starter(Protocol):
    """See the module. Callbacks come in other threads."""

    def agents(self, cycle: int, nodes: Sequence[str], ended: AgentsEnded) -> Step:
        """Start the agents of some nodes; ``ended`` gets exit code and lines of errors."""
        ...

    def ranks(self, cycle: int, command: Sequence[str], ended: Callable[[Verdict], None]) -> Step:
        """Start all ranks."""
        ...

    def mover(self, move: Move, said: MoverSaid, ended: MoverEnded) -> Step:
        """Start a mover; ``said`` gets lines of output, ``ended`` exit code, lines of output and errors, seconds."""
        ...

    def mark(self, nodes: Sequence[str], path: str, text: str) -> None:
        """Write a small file on nodes, or remove it (empty text); best effort, a few seconds at most."""
        ...

    def lines(self, command: Sequence[str]) -> list[Command]:
        """What would be started, for a dry run."""
        ...


class SrunStarter:
    """By srun.

    Args:
        job: What the command lines are made from.
        cluster: Kills steps.
        agent_log: Where the agents' logs go.
    """

    def __init__(self, job: Job, cluster: Cluster, agent_log: IO[bytes] | None = None) -> None:
        self._job, self._cluster, self._agent_log = job, cluster, agent_log

    def agents(self, cycle: int, nodes: Sequence[str], ended: AgentsEnded) -> Step:
        """See Starter."""
        command = commands.agents(self._job, cycle, nodes)
        kill = self._slurm_kill(command)
        log = self._agent_log
        return Process(
            command, stdout=log, stderr=log, ended=lambda step, code: ended(code, step.lines), slurm_kill=kill
        )

    def ranks(self, cycle: int, command: Sequence[str], ended: Callable[[Verdict], None]) -> Step:
        """See Starter."""
        layout = self._job.layout

        def place(verdict: Verdict) -> None:
            if verdict.task is None or verdict.node not in layout.nodes:
                ended(verdict)
                return
            rank = layout.rank(verdict.node, verdict.task % layout.ranks_per_node)
            words = verdict.words.replace(f"task {verdict.task} ", f"rank {rank} ", 1)
            ended(replace(verdict, rank=rank, words=words))

        made = commands.ranks(self._job, cycle, command)
        return Ranks(made, ended=place, slurm_kill=self._slurm_kill(made))

    def mover(self, move: Move, said: MoverSaid, ended: MoverEnded) -> Step:
        """See Starter."""
        command = commands.mover(self._job, move)
        return _mover(command, said, ended, self._slurm_kill(command))

    def _slurm_kill(self, command: Command) -> SlurmKill:
        return lambda wanted: self._cluster.kill_step(command.step, wanted)

    def mark(self, nodes: Sequence[str], path: str, text: str) -> None:
        """See Starter."""
        if not nodes:
            return
        step = Process(commands.mark(self._job, nodes, path, text), stderr=self._agent_log)
        if step.wait(MARK_S) is None:
            step.kill()

    def lines(self, command: Sequence[str]) -> list[Command]:
        """See Starter."""
        job = self._job
        return [
            commands.agents(job, 0, job.layout.nodes),
            commands.ranks(job, 0, command),
            commands.mover(job, Move(kind="drain", iteration=0)),
        ]


class LocalStarter:
    """As processes of this host, which is the only node.

    Args:
        job: What the environments are made from; its base environment has no variables of Slurm.
        agent_log: Where the agent's log goes.
    """

    def __init__(self, job: Job, agent_log: IO[bytes] | None = None) -> None:
        self._job, self._agent_log = job, agent_log
        (self._node,) = job.layout.nodes

    def _env(self, cycle: int) -> dict[str, str]:
        return commands.resil_env(self._job, cycle, dict(self._job.base_env)) | {"SLURMD_NODENAME": self._node}

    def _agent(self, cycle: int) -> Command:
        return Command(argv=tuple(commands.agent_args(self._job)), env=self._env(cycle), title="agent")

    def _ranks(self, cycle: int, command: Sequence[str]) -> list[Command]:
        argv = (self._job.python, "-m", "slurm_resil.launch.rank", "--", *command)
        per_node = self._job.layout.ranks_per_node
        return [
            Command(argv=argv, env=self._env(cycle) | {LOCAL_RANK: str(rank)}, title=f"rank {rank}")
            for rank in range(per_node)
        ]

    def _mover(self, move: Move) -> Command:
        argv = [*commands.mover_args(self._job, move), "--transport", "local"]
        return Command(argv=tuple(argv), env=self._env(0), title=f"{move.kind} of iteration {move.iteration}")

    def agents(self, cycle: int, nodes: Sequence[str], ended: AgentsEnded) -> Step:
        """See Starter."""
        log = self._agent_log
        return Process(self._agent(cycle), stdout=log, stderr=log, ended=lambda step, code: ended(code, step.lines))

    def ranks(self, cycle: int, command: Sequence[str], ended: Callable[[Verdict], None]) -> Step:
        """See Starter."""
        return LocalRanks(self._ranks(cycle, command), node=self._node, ended=ended)

    def mover(self, move: Move, said: MoverSaid, ended: MoverEnded) -> Step:
        """See Starter."""
        return _mover(self._mover(move), said, ended, None)

    def mark(self, nodes: Sequence[str], path: str, text: str) -> None:
        """See Starter."""
        write_mark(path, text)

    def lines(self, command: Sequence[str]) -> list[Command]:
        """See Starter."""
        return [self._agent(0), *self._ranks(0, command), self._mover(Move(kind="drain", iteration=0))]


def _mover(command: Command, said: MoverSaid, ended: MoverEnded, slurm_kill: SlurmKill | None) -> Step:
    began = time.monotonic()

    def end(step: Process, code: int) -> None:
        ended(code, [*step.lines, *step.out], time.monotonic() - began)

    doom_s = TELL_S if slurm_kill is not None else None
    # its words go to the event log
    return Process(command, stdout="pipe", quiet=True, said=said, ended=end, slurm_kill=slurm_kill, doom_s=doom_s)
