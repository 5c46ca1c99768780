"""What is left of an encode: found by all movers together, and judged set by set."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slurm_resil.comm.base import Communicator, agreed, allgather_json
from slurm_resil.core.errors import DataError
from slurm_resil.format.manifest import BLOCK_BYTES
from slurm_resil.redundancy import member
from slurm_resil.redundancy.geometry import Geometry
from slurm_resil.redundancy.member import MemberManifest, ParityReader
from slurm_resil.redundancy.package import Chunk, Package, PackageReader
from slurm_resil.redundancy.team import Node


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An encode that some node knows of.

    Attributes:
        token: Its name.
        iteration: Iteration that it protects.
        order: What makes one of the same iteration newer than another.
        places: Number of places of the run then.
        knowing: By set (the places of its members) the first mover that has a manifest of it.
    """

    token: str
    iteration: int
    order: tuple[int, int, float]
    places: int
    knowing: dict[tuple[int, ...], int] = field(default_factory=dict)


def candidates(comm: Communicator, own: Sequence[MemberManifest]) -> list[Candidate]:
    """Encodes that any node knows of, newest first. Collective."""
    mine = [
        {
            "token": one.token,
            "iteration": one.iteration,
            "order": [one.job_id, one.attempt, one.created_s],
            "places": one.places,
            "set": [package.node_rank for package in one.members],
        }
        for one in own
    ]
    found: dict[str, Candidate] = {}
    for rank, part in enumerate(allgather_json(comm, mine)):
        for entry in part:
            job_id, attempt, created_s = entry["order"]
            one = found.setdefault(
                entry["token"],
                Candidate(
                    token=entry["token"],
                    iteration=entry["iteration"],
                    order=(job_id, attempt, created_s),
                    places=entry["places"],
                ),
            )
            one.knowing.setdefault(tuple(entry["set"]), rank)
    return sorted(found.values(), key=lambda one: (one.iteration, one.order), reverse=True)


@dataclass
class State:
    """What a node has of an encode.

    Attributes:
        package: Whether its shards are there.
        parity: Whether its manifest and its parities are there.
        why: What is wrong, in words; empty if nothing is but that nothing is there.
        corrupt: What does not match its hashes.
    """

    package: bool = False
    parity: bool = False
    why: list[str] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SetView:
    """A set of an encode, as it is now.

    Attributes:
        ranks: Movers on the places of its members.
        names: Names of their nodes.
        states: What they have.
        geometry: Of the set.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    states: tuple[State, ...]
    geometry: Geometry

    @property
    def whole(self) -> bool:
        """Whether nothing is lost."""
        return all(state.package and state.parity for state in self.states)

    @property
    def lost(self) -> tuple[int, ...]:
        """Members whose shards are lost."""
        return tuple(index for index, state in enumerate(self.states) if not state.package)

    def missing(self, stripe: int) -> list[int]:
        """Columns of a stripe whose chunks are lost."""
        return [c for c, m in enumerate(self.geometry.contributors(stripe)) if not self.states[m].package]

    def parities(self, stripe: int) -> list[int]:
        """Rows of a stripe whose parities are there."""
        return [row for row, holder in enumerate(self.geometry.holders(stripe)) if self.states[holder].parity]

    @property
    def possible(self) -> bool:
        """Whether all that is lost can be had back."""
        return all(
            self.geometry.recover(stripe, missing, self.parities(stripe)) is not None
            for stripe in range(self.geometry.members)
            if (missing := self.missing(stripe))
        )

    def words(self) -> str:
        """How many were lost and how many are covered, for people."""
        lost = [
            name for name, state in zip(self.names, self.states, strict=True) if not (state.package and state.parity)
        ]
        why = [text for state in self.states for text in (*state.corrupt, *state.why)]
        more = f" ({'; '.join(why[:4])})" if why else ""
        return (
            f"the set of {', '.join(self.names)} lost {len(lost)} of its nodes ({', '.join(lost)}), "
            f"it covers {self.geometry.losses}{more}"
        )


class View:
    """An encode, as it is now, on all nodes. Methods are collective unless they say otherwise.

    Args:
        comm: Movers.
        job_dir: Job's directory in this node's burst buffer.
        candidate: Which encode.
        own: Manifests that this node has.
        nodes: Nodes by rank.
        stack: Holds what is opened.

    Attributes:
        manifest: A manifest of the own set, of whichever member; None if nobody has one.
        reader: Reads the own package; None if it is lost.
        parity: Reads the own parities; None if they are lost.
        sets: All sets; empty before :meth:`look`.
    """

    def __init__(
        self,
        comm: Communicator,
        job_dir: str,
        candidate: Candidate,
        own: Sequence[MemberManifest],
        nodes: Sequence[Node],
        stack: contextlib.ExitStack,
    ) -> None:
        self._comm, self._job_dir, self._nodes, self._stack = comm, job_dir, nodes, stack
        self.candidate = candidate
        self._own = next((one for one in own if one.token == candidate.token), None)
        self.manifest: MemberManifest | None = None
        self.reader: PackageReader | None = None
        self.parity: ParityReader | None = None
        self.sets: list[SetView] = []
        self._state = State()
        self._place = nodes[comm.rank].place

    def misfit(self) -> str:
        """Why this cannot be had back whatever is there, empty if nothing is against it. Not collective."""
        places, here = self.candidate.places, sorted(node.place for node in self._nodes)
        if here != list(range(places)):
            return f"it was saved by {places} nodes, the job has {len(here)} now"
        known = {place for one in self.candidate.knowing for place in one}
        gone = sorted(set(range(places)) - known)
        if gone:
            names = ", ".join(node.name for node in self._nodes if node.place in gone)
            return (
                f"nothing is left of the sets that the places of {names} were in: more nodes are lost than they cover"
            )
        return ""

    def look(self) -> None:
        """Find out what each node has; :meth:`misfit` must be empty."""
        by_place = {node.place: rank for rank, node in enumerate(self._nodes)}
        to = [b""] * self._comm.size
        for places, rank in self.candidate.knowing.items():
            if rank == self._comm.rank:
                assert self._own is not None
                text = self._own.to_bytes()
                for place in places:
                    to[by_place[place]] = text
        text = next(part for part in self._comm.exchange(to) if part)
        with agreed(self._comm, f"looking at what {self._job_dir} holds"):
            self.manifest = MemberManifest.from_bytes(text, where="the manifest of another member")
            self._look(self.manifest)
        self._gather()

    @property
    def package(self) -> Package:
        """Package of this node's place."""
        assert self.manifest is not None
        return next(one for one in self.manifest.members if one.node_rank == self._place)

    def _look(self, manifest: MemberManifest) -> None:
        try:
            self.reader = self._stack.enter_context(PackageReader(self._job_dir, manifest.iteration, self.package))
            self._state.package = True
        except DataError as error:
            if error.context.get("fault") != "missing":
                self._state.why.append(error.message)
        if self._own is None or self._own.node_rank != self._place:
            return
        try:
            self.parity = self._stack.enter_context(ParityReader(self._job_dir, self._own))
            self._state.parity = True
        except DataError as error:
            self._state.why.append(error.message)

    def _gather(self) -> None:
        assert self.manifest is not None
        mine = {
            **vars(self._state),
            "set": [package.node_rank for package in self.manifest.members],
            "kind": self.manifest.kind,
            "losses": self.manifest.losses,
        }
        gathered: list[dict[str, Any]] = allgather_json(self._comm, mine)
        by_place = {node.place: rank for rank, node in enumerate(self._nodes)}
        self.sets = []
        for places in dict.fromkeys(tuple(part["set"]) for part in gathered):
            ranks = tuple(by_place[place] for place in places)
            first = gathered[ranks[0]]
            self.sets.append(
                SetView(
                    ranks=ranks,
                    names=tuple(self._nodes[rank].name for rank in ranks),
                    states=tuple(
                        State(**{name: gathered[rank][name] for name in ("package", "parity", "why", "corrupt")})
                        for rank in ranks
                    ),
                    geometry=Geometry(kind=first["kind"], members=len(places), losses=first["losses"]),
                )
            )

    @property
    def own_set(self) -> SetView:
        """Set of this node. Not collective."""
        return next(one for one in self.sets if self._comm.rank in one.ranks)

    def verify(self) -> None:
        """Read all that sets which lost something would be rebuilt from; what does not match counts as lost."""
        with agreed(self._comm, f"verifying what {self._job_dir} holds"):
            if not self.own_set.whole:
                self._verify()
        self._gather()

    def _verify(self) -> None:
        assert self.manifest is not None
        buffer = np.empty(BLOCK_BYTES, np.uint8)
        name = self._nodes[self._comm.rank].name
        if self.reader is not None:
            flaw = package_flaw(self.reader, self.manifest.geometry, buffer)
            if flaw:
                self._state.package = False
                self._state.corrupt.append(f"{flaw} on {name}")
        if self.parity is not None:
            flaw = parity_flaw(self.parity, buffer)
            if flaw:
                self._state.parity = False
                self._state.corrupt.append(f"{flaw} on {name}")


def parity_flaw(reader: ParityReader, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """Compare all parities that a node holds with their hashes; says what differs first, empty if nothing does.

    Raises:
        OSError: They cannot be read.
    """
    for parity in reader.manifest.parities:
        try:
            bad = member.check_blocks(reader.source(parity), parity.nbytes, parity.blocks, buffer)
        except DataError as error:
            return error.message
        if bad is not None:
            return f"{reader.path}: its bytes from {parity.offset + bad * BLOCK_BYTES} on do not match their hash"
    return ""


def package_flaw(reader: PackageReader, geometry: Geometry, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """Compare all of a package with its hashes; says what differs first, empty if nothing does.

    Raises:
        OSError: It cannot be read.
    """
    package = reader.package
    try:
        for column, hashes in enumerate(package.blocks):
            start, stop = geometry.chunk(package.nbytes, column)
            bad = member.check_blocks(Chunk(reader, start), stop - start, hashes, buffer)
            if bad is not None:
                return reader.words(start + bad * BLOCK_BYTES, min(start + (bad + 1) * BLOCK_BYTES, stop))
    except DataError as error:
        return error.message
    return ""


def listing(job_dir: str, run_dir: str) -> tuple[list[MemberManifest], list[str]]:
    """Sound manifests of this run that a node holds, newest iteration first, and what is wrong with others.

    Raises:
        OSError: The directory cannot be read.
        ResilError: It is not this user's own.
    """
    run_id = os.path.basename(os.path.abspath(run_dir))
    good, bad = member.listed(job_dir)
    return [one for one in good if one.run_id == run_id], bad
