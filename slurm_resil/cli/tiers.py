"""Checkpoints of a run over all tiers: what nodes hold and what is on the parallel file system, put together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ClusterShell.NodeSet import NodeSet

from slurm_resil import catalog
from slurm_resil.catalog import RunCatalog
from slurm_resil.cli.look import Held, NodeView, look
from slurm_resil.cli.nodes import Asked, this_node
from slurm_resil.cli.places import names
from slurm_resil.cli.prune import retention
from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError
from slurm_resil.core.model import CheckpointState, Levels
from slurm_resil.core.retention import Checkpoint, judge
from slurm_resil.drain import find
from slurm_resil.format.manifest import DrainedManifest
from slurm_resil.launch import records


@dataclass(kw_only=True)
class Seen:
    """One iteration, over all that was seen.

    Attributes:
        iteration: Which.
        held: What nodes hold of it.
        drained: Published manifest on the parallel file system.
        draining: Whether there is a file of a drain that is at work, or has not come to its end.
        state: State in the catalog's words.
        said: Whether the state is what the launcher has written down, and the nodes were not seen.
        dropped: Why it never became durable, as its job's last processes have written down; empty if they have not.
        kept: Why the retention keeps the drained file; empty if it goes with the next deletion.
        file_faults: What is wrong with the drained file.
    """

    iteration: int
    held: dict[str, Held] = field(default_factory=dict)
    drained: DrainedManifest | None = None
    draining: bool = False
    state: CheckpointState = CheckpointState.LOST
    said: bool = False
    dropped: str = ""
    kept: tuple[str, ...] = ()
    file_faults: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """Ranks whose shards were seen."""
        return sorted({rank for held in self.held.values() for rank in held.ranks})

    @property
    def world_size(self) -> int:
        """Number of ranks of the checkpoint; 0 if nothing says it."""
        if self.drained is not None:
            return self.drained.world_size
        return max((held.world_size for held in self.held.values()), default=0)

    @property
    def created_s(self) -> float:
        """When it was sealed or published, Unix seconds."""
        if self.drained is not None:
            return self.drained.created_s
        return max((held.created_s for held in self.held.values()), default=0.0)

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the training said of it."""
        if self.drained is not None:
            return self.drained.metrics
        firsts = sorted(self.held.values(), key=lambda held: min(held.ranks, default=1 << 60), reverse=True)
        return {name: value for held in firsts for name, value in held.metrics.items()}

    @property
    def nbytes(self) -> int:
        """Size of the shards that were seen."""
        return sum(held.nbytes for held in self.held.values())

    @property
    def faults(self) -> list[str]:
        """What is wrong with it, by a look."""
        several = len(self.held) > 1
        return self.file_faults + [
            f"{node}: {fault}" if several else fault for node, held in self.held.items() for fault in held.faults
        ]

    @property
    def rebuildable(self) -> bool:
        """Whether shards are lost that can be had back."""
        parts = [part for held in self.held.values() for part in held.parts]
        lost = not set(range(self.world_size)) <= set(self.ranks)
        return lost and catalog.rebuildable(ranks=self.ranks, world_size=self.world_size, parts=parts)

    @property
    def scheme(self) -> str:
        """How it is protected, or was to be."""
        return ", ".join(sorted({part.scheme for held in self.held.values() for part in held.parts}))

    def row(self) -> dict[str, object]:
        """Plain form."""
        return {
            "iteration": self.iteration,
            "state": self.state.value,
            "said_by_launcher": self.said,
            "local_ranks": self.ranks,
            "world_size": self.world_size,
            "local_bytes": self.nbytes,
            "scheme": self.scheme or None,
            "parity_bytes": sum(held.parity_bytes for held in self.held.values()),
            "rebuildable": self.rebuildable,
            "nodes": {
                node: {
                    "ranks": held.ranks,
                    "bytes": held.nbytes,
                    "parity_bytes": held.parity_bytes,
                    "protects": bool(held.parts),
                    "staged_bytes": held.staged_bytes,
                    "marked_durable": held.marked,
                    "faults": held.faults,
                }
                for node, held in self.held.items()
            },
            "marked_durable": any(held.marked for held in self.held.values()),
            "file": self.drained.file if self.drained else None,
            "file_bytes": self.drained.file_bytes if self.drained else None,
            "created_s": self.created_s,
            "metrics": dict(self.metrics),
            "dropped": self.dropped or None,
            "kept": list(self.kept),
            "faults": self.faults,
        }

    def where(self) -> str:
        """Nodes that hold shards and parities, in short."""
        shards = [node for node, held in self.held.items() if held.ranks]
        parity = [node for node, held in self.held.items() if held.parts]
        staged = [node for node, held in self.held.items() if held.staged_bytes]
        words = [f"{NodeSet.fromlist(shards)}"] if shards else []
        if parity:
            same = " (+parity)" if parity == shards else f"parity on {NodeSet.fromlist(parity)}"
            words = [words[0] + same] if parity == shards else [*words, same]
        words += [f"staged on {NodeSet.fromlist(staged)}"] if staged else []
        return ", ".join(words) or "-"


def here(run_dir: str | None, job_dir: str | None) -> list[Seen]:
    """All that this node and the parallel file system hold, newest first. Either directory may be missing."""
    views = {this_node(): look(job_dir, this_node())} if job_dir else {}
    return together(run_dir, Asked(views=views))


def together(run_dir: str | None, asked: Asked) -> list[Seen]:
    """Put what nodes told and what the parallel file system holds together, newest first."""
    seen: dict[int, Seen] = {}

    def at(iteration: int) -> Seen:
        return seen.setdefault(iteration, Seen(iteration=iteration))

    for node in sorted(asked.views):
        for held in asked.views[node].held:
            at(held.iteration).held[node] = held
    if run_dir:
        for name in names(run_dir):
            published = paths.parse_drained(name)
            if published is not None:
                _published(at(published), run_dir)
            elif name.startswith(".") and (parsed := paths.parse_of_drained(name)) and parsed[1] == "h5.part":
                at(parsed[0]).draining = True
            elif (parsed := paths.parse_of_drained(name)) and parsed[1] == "bad":
                words = f"{os.path.join(run_dir, name)}: did not verify when it was restored"
                at(parsed[0]).file_faults.append(words)
            elif parsed and parsed[1] == "dropped":
                at(parsed[0]).dropped = _dropped(os.path.join(run_dir, name))
        _judge([entry for entry in seen.values() if entry.drained is not None], run_dir)
    levels = records.levels(run_dir) if run_dir and asked.unseen and asked.goes_on else None
    if levels is not None:
        for iteration in {levels.local, levels.protected} - {0}:
            at(iteration)
    newest = records.newest(run_dir) if run_dir else None
    _states(seen, asked, levels, newest.attempt if newest is not None else -1)
    return [seen[iteration] for iteration in sorted(seen, reverse=True)]


def _states(seen: Mapping[int, Seen], asked: Asked, levels: Levels | None, attempt: int) -> None:
    complete = max(
        (i for i, entry in seen.items() if set(range(entry.world_size)) <= set(entry.ranks) != set()), default=-1
    )
    for iteration, entry in seen.items():
        entry.state = catalog.state(
            durable=entry.drained is not None,
            draining=entry.draining,
            ranks=entry.ranks,
            world_size=entry.world_size,
            parts=[part for held in entry.held.values() for part in held.parts],
            everywhere=asked.everywhere,
            newest=iteration > complete and _may_come(entry, attempt),
        )
        if entry.dropped and entry.state is CheckpointState.LOST:
            entry.state = CheckpointState.DROPPED
        if levels is None or entry.state in (CheckpointState.DURABLE, CheckpointState.DRAINING):
            continue
        if iteration == levels.protected:
            entry.state, entry.said = CheckpointState.PROTECTED, entry.state is not CheckpointState.PROTECTED
        elif iteration == levels.local and entry.state is CheckpointState.LOST:
            entry.state, entry.said = CheckpointState.LOCAL, True


def _may_come(entry: Seen, attempt: int) -> bool:
    """Whether ranks may be sealing it: what an attempt before this one has not sealed on all nodes nobody seals."""
    encoded = any(held.encoded for held in entry.held.values())  # all had sealed
    return not encoded and max((held.attempt for held in entry.held.values()), default=-1) >= attempt


def _dropped(path: str) -> str:
    """Why a checkpoint was given up."""
    try:
        raw = fsio.read_json(path)
        kept = " (its shards are on the nodes still)" if raw.get("kept") is True else ""
        return f"{raw['why']}{kept}, as node {raw['node']} of job {raw['job_id']} has written down"
    except (OSError, DataError, KeyError, TypeError, AttributeError):
        return f"{path} says so, and cannot be read"


def _published(entry: Seen, run_dir: str) -> None:
    entry.drained = find.durable(run_dir, entry.iteration)
    if entry.drained is None:
        entry.file_faults.append(_why(run_dir, entry.iteration))


def _judge(entries: list[Seen], run_dir: str) -> None:
    """Say of drained checkpoints why they stay, by the rules of the environment."""
    found = []
    for entry in entries:
        by_hand = os.path.lexists(paths.drained_kept(run_dir, entry.iteration))
        one = Checkpoint(iteration=entry.iteration, created_s=entry.created_s, metrics=entry.metrics, by_hand=by_hand)
        found.append(one)
    why = judge(found, retention(os.environ))
    for entry in entries:
        entry.kept = why[entry.iteration]


def _why(run_dir: str, iteration: int) -> str:
    try:
        RunCatalog(run_dir).load(iteration)
    except (DataError, OSError) as error:
        return str(error)
    return f"{paths.drained_manifest(run_dir, iteration)} or its file was damaged a moment ago"


def nodes_row(views: Mapping[str, NodeView]) -> dict[str, object]:
    """What is to be said of nodes as a whole."""
    return {
        node: {"job_dir": view.job_dir, "free_bytes": view.free_bytes, "faults": view.faults}
        for node, view in views.items()
    }
