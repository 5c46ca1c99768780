"""Reads checkpoints in full, on all tiers that are within reach, and says which are sound."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ClusterShell.NodeSet import NodeSet

from slurm_resil.cli.look import read
from slurm_resil.cli.nodes import Asked, this_node
from slurm_resil.cli.tiers import Seen
from slurm_resil.core.errors import DataError, ServiceError
from slurm_resil.drain import check
from slurm_resil.format.manifest import DrainedManifest

WORDS = {True: "sound", False: "DAMAGED", None: "UNKNOWN"}


@dataclass(kw_only=True)
class Result:
    """What became of one iteration.

    Attributes:
        entry: It.
        flaws: What is wrong.
        unread: What could not be read, so that nothing is known of it.
    """

    entry: Seen
    flaws: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool | None:
        """Whether it is; None if that is not known."""
        if self.flaws:
            return False
        return None if self.unread or not (self.entry.held or self.entry.drained) else True

    def row(self, *, deep: bool) -> dict[str, object]:
        """Plain form."""
        return {
            "iteration": self.entry.iteration,
            "state": self.entry.state.value,
            "sound": self.sound,
            "deep": deep,
            "unread": "; ".join(self.unread),
            "local_ranks": self.entry.ranks,
            "nodes": {
                node: {"ranks": held.ranks, "protects": bool(held.parts), "flaws": held.flaws, "unread": held.unread}
                for node, held in self.entry.held.items()
            },
            "file": self.entry.drained.file if self.entry.drained else None,
            "flaws": self.flaws,
        }

    def words(self) -> str:
        """What it is about, for people."""
        held = self.entry.held
        where = "here" if set(held) <= {this_node()} else f"on {NodeSet.fromlist(list(held))}"
        tiers = [f"ranks {self.entry.ranks} {where}"] if self.entry.ranks else []
        if any(one.parts for one in held.values()):
            tiers.append(f"redundancy ({self.entry.scheme})")
        tiers += [str(self.entry.drained.file)] if self.entry.drained else []
        return f"{self.entry.iteration}: {WORDS[self.sound]} ({', '.join(tiers) or 'nothing'})"


def arguments(iterations: Collection[int], *, deep: bool) -> list[str]:
    """What a node is asked with, see ``ckpt here``."""
    return ["--verify", *(["--deep"] if deep else []), *(f"--iteration={one}" for one in iterations)]


def total_bytes(entries: Collection[Seen]) -> int:
    """Bytes that are read from where we are."""
    own = [entry.held[this_node()] for entry in entries if this_node() in entry.held]
    local = sum(held.nbytes + held.parity_bytes for held in own if held.flaws is None)
    return local + sum(entry.drained.file_bytes for entry in entries if entry.drained is not None)


def verify(
    run_dir: str, asked: Asked, entries: Collection[Seen], *, deep: bool, done: Callable[[int], None]
) -> list[Result]:
    """Read what other nodes have not read already.

    Args:
        run_dir: Run's directory.
        asked: What nodes told; its views are those that the entries were made from.
        entries: Checkpoints.
        deep: See :func:`slurm_resil.cli.look.read`; and HDF5's own view of drained files, and them against shards.
        done: Told the bytes that were read.
    """
    results = []
    own = asked.views.get(this_node())
    several = len(asked.views) > 1
    for entry in entries:
        result = Result(entry=entry, flaws=list(entry.faults))
        mine = entry.held.get(this_node())
        if own is not None and mine is not None and mine.flaws is None:
            read(own, (entry.iteration,), deep=deep, done=done)
        for node, held in entry.held.items():
            before = f"{node}: " if several else ""
            result.flaws += [before + flaw for flaw in held.flaws or ()]
            result.unread += [before + held.unread] if held.unread else []
        if entry.drained is not None:
            try:
                result.flaws += check.drained_flaws(run_dir, entry.iteration, done)
                if deep:
                    result.flaws += _deep(run_dir, own.job_dir if own else None, entry.drained, done)
            except OSError as error:
                result.unread.append(f"{os.fsdecode(error.filename or run_dir)} cannot be read: {error.strerror}")
        result.flaws = list(dict.fromkeys(result.flaws))
        results.append(result)
    return results


def _deep(run_dir: str, job_dir: str | None, manifest: DrainedManifest, done: Callable[[int], None]) -> list[str]:
    from slurm_resil.drain import deep  # h5py

    flaws = deep.structure_flaws(run_dir, manifest)
    return flaws + (deep.item_flaws(run_dir, manifest, job_dir, done) if job_dir else [])


def judge(results: Collection[Result], asked: Asked, *, told: bool) -> None:
    """End the command as its results demand.

    Args:
        results: All of them.
        asked: What nodes told.
        told: Whether they were printed as JSON.

    Raises:
        DataError: One is damaged, or something on a node is not what it should be.
        ServiceError: None is, but something could not be read.
    """
    bad = [str(result.entry.iteration) for result in results if result.flaws]
    odd = [f"{node}: {fault}" for node, view in asked.views.items() for fault in view.faults]
    if bad or odd:
        words = "; ".join(filter(None, [f"damaged: iteration {', '.join(bad)}" if bad else "", *odd]))
        damaged = DataError(words, mend="another tier or an earlier iteration may be sound")
        damaged.told = told
        raise damaged
    unread = [f"iteration {result.entry.iteration}: {text}" for result in results for text in result.unread]
    if asked.job_id is not None:
        unread += [f"{node}: {why}" for node, why in asked.unseen.items()]
    if unread:
        silence = ServiceError("; ".join(unread), mend="see to the storage or the node, then verify again")
        silence.told = told
        raise silence
