"""Encode: the nodes of each set protect each other's shards of one checkpoint.

Order: find the shards and pin them, leave out what enough nodes hold anyway, stream the packages once, check that no
slot was written meanwhile, put the parities in their places, and last publish the members' manifests. The checkpoint is
protected when every member of every set has published; before that nobody counts on any of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from slurm_resil.comm.base import Communicator, agreed, allgather_json, bcast_json, stopped
from slurm_resil.core import faults, paths
from slurm_resil.core.errors import ConfigError, ResilError
from slurm_resil.core.log import now_s
from slurm_resil.core.progress import Progress
from slurm_resil.core.schemes import Scheme
from slurm_resil.core.throttle import Throttle
from slurm_resil.format.manifest import BLOCK_BYTES
from slurm_resil.redundancy import find, gf, member, replicas, team
from slurm_resil.redundancy.flow import SEGMENT_BYTES, Flow, Sink, Source, Sum, Term
from slurm_resil.redundancy.geometry import Geometry
from slurm_resil.redundancy.member import MemberManifest, ParityWriter
from slurm_resil.redundancy.package import HashedChunk, Package, PackageReader, describe
from slurm_resil.redundancy.team import Node


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to encode.

    Attributes:
        scheme: Scheme.
        set_size: Members wanted in a set, where sets are made here; None: the default.
        sets: File that names the sets; None: they are made here.
        cap_bytes_s: Limit of what all movers together read, bytes/s; None: none.
    """

    scheme: Scheme
    set_size: int | None = None
    sets: str | None = None
    cap_bytes_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an encode came to, the same on all movers.

    Attributes:
        iteration: Iteration that is protected now.
        scheme: Scheme.
        losses: Nodes that every set may lose; less than the scheme's if a set is too small for it.
        nbytes: Bytes of all packages.
        parity_bytes: Bytes of all parities.
        seconds: Duration.
        already: It was protected before; nothing was written.
    """

    iteration: int
    scheme: str
    losses: int
    nbytes: int
    parity_bytes: int
    seconds: float
    already: bool


def encode(
    comm: Communicator,
    *,
    run_dir: str,
    job_dir: str,
    iteration: int | None,
    options: Options,
    env: dict[str, str],
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Outcome:
    """Protect one checkpoint. Collective over ``comm``, one rank for each node.

    Args:
        comm: Movers.
        run_dir: Run's directory on the parallel file system, the same for all.
        job_dir: Job's directory in each node's burst buffer.
        iteration: Which; None: the newest that all ranks have sealed.
        options: How.
        env: Environment, for the node's name.
        stop: Asked between segments on every rank; True on any rank ends the encode.
        progress: Told how far it is, on every rank.

    Raises:
        ConfigError: Nothing can be protected so: a set of one node, or nodes that do not fit.
        DataError: A shard is damaged, or was written again meanwhile.
        TryAgainError: Not sealed everywhere, or stopped.
        SpaceError: No space for the parities.
        ResilError: Storage failed otherwise. All the same on every rank; nothing was published then.
    """
    started = time.monotonic()
    nodes = team.nodes(comm, run_dir, env)
    sets = team.sets(comm, nodes, options.sets, size=options.set_size, scheme=options.scheme)
    _protectable(options.scheme, sets, nodes)
    with contextlib.ExitStack() as stack:
        own = find.sealed_by_all(comm, job_dir, run_dir, iteration, stack)
        job = _Encode(comm, job_dir, options, nodes, sets, stop, progress)
        return job.run(own, stack, started)


def _protectable(scheme: Scheme, sets: Sequence[Sequence[int]], nodes: Sequence[Node]) -> None:
    if scheme.kind == "single":
        raise ConfigError("the scheme `single` protects nothing", mend="take partner, xor or rs")
    alone = [nodes[one[0]].name for one in sets if len(one) == 1]
    if alone:
        raise ConfigError(
            f"node {', '.join(alone[:8])} is alone in its set: nothing can be protected there",
            mend="take 2 nodes or more, in sets of 2 or more",
        )


class _Encode:
    def __init__(
        self,
        comm: Communicator,
        job_dir: str,
        options: Options,
        nodes: Sequence[Node],
        sets: Sequence[Sequence[int]],
        stop: Callable[[], bool],
        progress: Callable[[Progress], None],
    ) -> None:
        self.comm, self.job_dir, self.options, self.nodes, self.sets = comm, job_dir, options, nodes, sets
        self.stop, self.progress = stop, progress
        self.set = next(one for one in sets if comm.rank in one)
        self.index = self.set.index(comm.rank)
        self.geometry = Geometry.of(options.scheme, len(self.set))

    def run(self, own: find.Sealed, stack: contextlib.ExitStack, started: float) -> Outcome:
        """Encode what was found."""
        with agreed(self.comm, f"reading what {self.job_dir} holds"):
            there, _ = member.listed(self.job_dir)
        before = self._already(own, there)
        if before is not None:
            return self._outcome(before, started, already=True)
        package, reader = self._open(own, stack)
        sizes = [json.loads(part) for part in self._among([json.dumps(package.nbytes).encode()] * len(self.set))]
        with agreed(self.comm, f"making the parities in {self.job_dir}"):
            faults.point("encode.open")
            writer = ParityWriter(
                self.job_dir,
                own.iteration,
                self.nodes[self.comm.rank].place,
                member.layout(self.geometry, self.index, sizes),
            )
            stack.enter_context(writer)
        manifest = self._stream(own, package, reader, writer, sizes)
        self._publish(manifest, reader, writer)
        self._prune(manifest)
        return self._outcome(manifest, started, already=False)

    def _already(self, own: find.Sealed, there: Sequence[MemberManifest]) -> MemberManifest | None:
        """This node's manifest if all nodes have one, of the same encode, of what is to be done; else None."""
        place = self.nodes[self.comm.rank].place
        mine = next((one for one in there if (one.iteration, one.node_rank) == (own.iteration, place)), None)
        if mine is not None and not self._still(mine, own):
            mine = None
        tokens = allgather_json(self.comm, mine.token if mine else None)
        return mine if len(set(tokens)) == 1 else None

    def _still(self, mine: MemberManifest, own: find.Sealed) -> bool:
        places = [self.nodes[rank].place for rank in self.set]
        wanted = (str(self.options.scheme), places, (own.job_id, own.attempt))
        if (mine.scheme, [p.node_rank for p in mine.members], (mine.job_id, mine.attempt)) != wanted:
            return False
        shards = {(shard.rank, shard.slot, shard.generation) for shard in mine.members[self.index].shards}
        if shards != {(one.rank, one.slot, one.generation) for one in own.manifests}:
            return False
        try:
            with member.ParityReader(self.job_dir, mine):
                return True
        except ResilError:
            return False

    def _open(self, own: find.Sealed, stack: contextlib.ExitStack) -> tuple[Package, PackageReader]:
        losses = [Geometry.of(self.options.scheme, len(one)).losses for one in self.sets]
        omit = replicas.held_by_enough(self.comm, own.manifests, self.sets, losses)
        node = self.nodes[self.comm.rank]
        with agreed(self.comm, f"opening the slots in {self.job_dir}"):
            shards = [describe(self.job_dir, one, omit[one.rank]) for one in own.manifests]
            package = Package.of(node.name, node.place, shards)
            reader = stack.enter_context(PackageReader(self.job_dir, own.iteration, package))
        return package, reader

    def _among(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send a part to each member of the own set; returns what they sent here. Collective over all sets."""
        to = [b""] * self.comm.size
        for rank, part in zip(self.set, parts, strict=True):
            to[rank] = part
        got = self.comm.exchange(to)
        return [got[rank] for rank in self.set]

    def _stream(
        self, own: find.Sealed, package: Package, reader: PackageReader, writer: ParityWriter, sizes: Sequence[int]
    ) -> MemberManifest:
        """Send, add up and write; returns the manifest that is to be published."""
        starts = (self.geometry.chunk(package.nbytes, column)[0] for column in range(self.geometry.chunks))
        chunks = [HashedChunk(reader, start) for start in starts]
        sums = sums_of_set(self.geometry, self.set, sizes)
        total = sum(allgather_json(self.comm, package.nbytes))
        sources: dict[Hashable, Source] = dict(enumerate(chunks))
        sinks: dict[Hashable, Sink] = dict(writer.sinks.items())
        done = 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            share = done / package.nbytes if package.nbytes else 1.0
            self.progress(Progress(phase="encode", done_bytes=int(share * total), total_bytes=total))

        flow = Flow(
            self.comm,
            sums,
            sources,
            sinks,
            throttle=self._throttle(package.nbytes, total),
            stop=self.stop,
            passing=lambda: faults.point("encode.segment"),
            progress=count,
        )
        flow.run()
        hashed = replace(package, blocks=tuple(chunk.blocks() for chunk in chunks))
        texts = self._among([json.dumps(hashed, default=vars).encode()] * len(self.set))
        members = tuple(Package.from_raw(json.loads(text)) for text in texts)
        token = bcast_json(self.comm, secrets.token_hex(8))
        return MemberManifest(
            token=token,
            run_id=own.run_id,
            job_id=own.job_id,
            attempt=own.attempt,
            iteration=own.iteration,
            world_size=own.world_size,
            places=len(self.nodes),
            node_rank=package.node_rank,
            scheme=str(self.options.scheme),
            kind=self.geometry.kind,
            losses=self.geometry.losses,
            block_bytes=BLOCK_BYTES,
            members=members,
            parities=writer.parities(),
            created_s=now_s(),
        )

    def _throttle(self, nbytes: int, total: int) -> Throttle:
        """Each mover has the part of the cap that it has of the bytes."""
        cap = self.options.cap_bytes_s
        if cap is None:
            return Throttle(None, 0)
        return Throttle(max(cap * nbytes / max(total, 1), 1.0), SEGMENT_BYTES, stop=self.stop)

    def _publish(self, manifest: MemberManifest, reader: PackageReader, writer: ParityWriter) -> None:
        """Put parities in their places on all nodes, then manifests; on none if anything is wrong on any."""
        path = paths.member(self.job_dir, manifest.iteration, manifest.node_rank)
        with agreed(self.comm, "looking at the slots again"):
            faults.point("encode.verify")
            reader.check()
            if self.stop():
                raise stopped("encode")
        with agreed(self.comm, f"putting the parities in their places in {self.job_dir}"):
            faults.point("encode.rename")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of an encode before: it does not describe what takes its parities' place
            writer.publish()
        try:
            with agreed(self.comm, f"publishing {path}"):
                faults.point("encode.publish")
                manifest.publish(path, sync=False)
        except ResilError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise

    def _prune(self, manifest: MemberManifest) -> None:
        """Remove older encodes but the newest that came to its end; this one is published, whatever comes of it."""
        with contextlib.suppress(OSError, ResilError):
            faults.point("encode.prune")
            older = [one.iteration for one in member.listed(self.job_dir)[0] if one.iteration < manifest.iteration]
            member.prune(self.job_dir, [], [manifest.iteration, *older])

    def _outcome(self, manifest: MemberManifest, started: float, *, already: bool) -> Outcome:
        own = manifest.members[manifest.index].nbytes
        parts = allgather_json(self.comm, [own, manifest.file_bytes, manifest.losses])
        return Outcome(
            iteration=manifest.iteration,
            scheme=manifest.scheme,
            losses=min(part[2] for part in parts),
            nbytes=sum(part[0] for part in parts),
            parity_bytes=sum(part[1] for part in parts),
            seconds=time.monotonic() - started,
            already=already,
        )


def sums_of_set(geometry: Geometry, ranks: Sequence[int], sizes: Sequence[int]) -> list[Sum]:
    """All parities of a set as sums: sinks are (stripe, row), streams the columns of the chunks.

    Args:
        geometry: Of the set.
        ranks: Movers of the members.
        sizes: Of the members' packages.
    """
    packages = dict(enumerate(sizes))
    code, factors = geometry.coefficients(), gf.factors(geometry.losses)
    sums = []
    for stripe in range(geometry.members):
        nbytes = geometry.parity_bytes(packages, stripe)
        for row, holder in enumerate(geometry.holders(stripe)):
            terms = []
            for column, giver in enumerate(geometry.contributors(stripe)):
                start, stop = geometry.chunk(sizes[giver], column)
                coefficient = 1 if factors else code[row][column]
                size = stop - start
                terms.append(Term(rank=ranks[giver], stream=column, nbytes=size, slot=column, coefficient=coefficient))
            factor = factors[row] if factors else 1
            sums.append(Sum(rank=ranks[holder], sink=(stripe, row), nbytes=nbytes, terms=tuple(terms), factor=factor))
    return sums
