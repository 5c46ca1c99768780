"""Rebuild: shards that were lost with nodes are made again from what the other nodes of their sets hold.

The newest checkpoint that can be had is made whole: shards on the nodes that have the places of the lost ones now,
verified down to the last byte before their manifests are published, then the parities that were lost. What does not
match its hashes counts as lost. What survived is not touched. A rebuild that is killed leaves things as they were, or
with more of them whole; the next one goes on from there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from slurm_resil.comm.base import Communicator, agreed, allgather_json, stopped
from slurm_resil.core import faults, layout, paths, pins
from slurm_resil.core.errors import DataError, TryAgainError
from slurm_resil.core.log import now_s
from slurm_resil.core.progress import Progress
from slurm_resil.core.throttle import Throttle
from slurm_resil.format import contents, sealed
from slurm_resil.format.manifest import ShardManifest
from slurm_resil.redundancy import items, member, survey, team
from slurm_resil.redundancy.encode import sums_of_set
from slurm_resil.redundancy.flow import SEGMENT_BYTES, Flow, Sink, Source, Sum, Term
from slurm_resil.redundancy.member import ParityWriter
from slurm_resil.redundancy.package import Chunk, ChunkSink, PackageReader, PackageWriter
from slurm_resil.redundancy.survey import Candidate, SetView, View


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rebuild came to, the same on all movers.

    Attributes:
        iteration: Newest iteration that is whole now; None if there is none and nothing was to be done.
        nodes: Nodes that got shards or parities.
        nbytes: Bytes that were made again.
        seconds: Duration.
        passed_over: Newer checkpoints that cannot be had, and why.
        corrupt: What did not match its hashes.
    """

    iteration: int | None
    nodes: tuple[str, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    passed_over: tuple[str, ...] = ()
    corrupt: tuple[str, ...] = ()


def rebuild(
    comm: Communicator,
    *,
    run_dir: str,
    job_dir: str,
    iteration: int | None,
    env: Mapping[str, str],
    cap_bytes_s: float | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Outcome:
    """Make the newest checkpoint whole that can be had. Collective over ``comm``, one rank for each node.

    Args:
        comm: Movers.
        run_dir: Run's directory on the parallel file system, the same for all.
        job_dir: Job's directory in each node's burst buffer; it is made where there is none.
        iteration: Which; None: the newest that can be had.
        env: Environment, for the node's name.
        cap_bytes_s: Limit of what all movers together read, bytes/s; None: none.
        stop: Asked between segments on every rank; True on any rank ends the rebuild.
        progress: Told how far it is, on every rank.

    Raises:
        DataError: Nothing can be had; says of each checkpoint how many nodes were lost and how many are covered.
        ConfigError: The nodes do not fit the run's layout.
        TryAgainError: Stopped, or somebody reads what is to be replaced.
        SpaceError: No space.
        ResilError: Storage failed otherwise. All the same on every rank.
    """
    started = time.monotonic()
    job = _Rebuild(comm, run_dir, job_dir, env, cap_bytes_s, stop, progress)
    outcome = job.run(iteration)
    return replace(outcome, seconds=time.monotonic() - started)


@dataclass
class _Made:
    """What was made again."""

    ranks: set[int] = field(default_factory=set)
    nbytes: int = 0


class _Rebuild:
    def __init__(
        self,
        comm: Communicator,
        run_dir: str,
        job_dir: str,
        env: Mapping[str, str],
        cap_bytes_s: float | None,
        stop: Callable[[], bool],
        progress: Callable[[Progress], None],
    ) -> None:
        self.comm, self.run_dir, self.job_dir = comm, run_dir, job_dir
        self.cap_bytes_s, self.stop, self.progress = cap_bytes_s, stop, progress
        self.nodes = team.nodes(comm, run_dir, env)
        self.corrupt: list[str] = []

    def run(self, iteration: int | None) -> Outcome:
        """Try the candidates."""
        bad: list[str] = []
        with agreed(self.comm, f"reading what {self.job_dir} holds"):
            faults.point("rebuild.survey")
            self._tidy()
            own, bad = survey.listing(self.job_dir, self.run_dir)
        self.corrupt += [text for part in allgather_json(self.comm, bad) for text in part]
        complete = self._complete(iteration)
        passed_over: list[str] = []
        for one in survey.candidates(self.comm, own):
            if iteration not in (None, one.iteration):
                continue
            if one.iteration < complete:
                break
            with contextlib.ExitStack() as stack:
                with agreed(self.comm, f"pinning iteration {one.iteration} in {self.job_dir}"):
                    stack.enter_context(pins.hold(self.job_dir, one.iteration))
                view = View(self.comm, self.job_dir, one, own, self.nodes, stack)
                why, made = self._attempt(view, stack)
            if not why:
                nodes = tuple(self.nodes[rank].name for rank in sorted(made.ranks))
                return self._outcome(one.iteration, passed_over, nodes=nodes, nbytes=made.nbytes)
            passed_over.append(f"iteration {one.iteration}: {why}")
        if complete or (iteration is None and not passed_over):
            return self._outcome(complete or None, passed_over)
        if not passed_over:
            raise DataError(
                f"nothing in {self.job_dir} on any node protects iteration {iteration}",
                mend="look with `slurm-resil ckpt ls`",
            )
        raise DataError(
            "; ".join([*passed_over, *self.corrupt]), mend="go on from the checkpoint on the parallel file system"
        )

    def _outcome(
        self, iteration: int | None, passed_over: Sequence[str], *, nodes: tuple[str, ...] = (), nbytes: int = 0
    ) -> Outcome:
        return Outcome(
            iteration=iteration,
            nodes=nodes,
            nbytes=nbytes,
            passed_over=tuple(passed_over),
            corrupt=tuple(dict.fromkeys(self.corrupt)),
        )

    def _tidy(self) -> None:
        """Make the directory where there is none, and remove what a rebuild left that was killed."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.job_dir, 0o700)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(os.path.join(self.job_dir, "slots")):
                if name.startswith(".rebuild-") and name.endswith(".part"):
                    os.unlink(os.path.join(self.job_dir, "slots", name))

    def _complete(self, iteration: int | None) -> int:
        """Newest iteration of which every rank's shard is on its place; 0 if there is none."""
        mine: list[dict[str, object]] = []
        with agreed(self.comm, f"reading the layout in {self.run_dir} and the manifests in {self.job_dir}"):
            places = layout.load(self.run_dir)
            for one in sealed.listed(self.job_dir):
                for manifest in sealed.load(self.job_dir, one)[0]:
                    at_home = places is None or self._at_home(manifest, places)
                    if at_home and iteration in (None, one):
                        mine.append({"iteration": one, **asdict(sealed.Found.of(manifest, self.comm.rank))})
        found: dict[int, list[sealed.Found]] = {}
        for part in allgather_json(self.comm, mine):
            for entry in part:
                found.setdefault(entry.pop("iteration"), []).append(sealed.Found(**entry))
        for one in sorted(found, reverse=True):
            with contextlib.suppress(DataError, TryAgainError):
                sealed.choose(found[one], [], one)
                return one
        return 0

    def _at_home(self, manifest: ShardManifest, places: layout.Layout) -> bool:
        return manifest.rank // places.ranks_per_node == self.nodes[self.comm.rank].place

    def _attempt(self, view: View, stack: contextlib.ExitStack) -> tuple[str, _Made]:
        """Make an encode whole; says why it cannot be, if it cannot."""
        made = _Made()
        why = view.misfit()
        if why:
            return why, made
        view.look()
        why = self._impossible(view)
        if why or all(one.whole for one in view.sets):
            return why, made
        view.verify()
        self.corrupt += [text for one in view.sets for state in one.states for text in state.corrupt]
        why = self._impossible(view)
        if why:
            return why, made
        lost = self.comm.rank in {one.ranks[index] for one in view.sets for index in one.lost}
        reader = None if lost else view.reader
        wants = list(items.wanted(view.package)) if lost else []
        gifts, flaws, nobody = items.agree_on_givers(self.comm, wants, reader)
        self.corrupt += flaws
        if nobody:
            return f"{len(nobody)} items that several nodes held are lost with all of them", made
        if any(one.lost for one in view.sets):
            reader = self._shards(view, reader, gifts, made, stack)
        assert reader is not None
        self._parities(view, reader, made, stack)
        return "", made

    @staticmethod
    def _impossible(view: View) -> str:
        return "; ".join(one.words() for one in view.sets if not one.possible)

    def _flow(
        self, sums: Sequence[Sum], sources: dict[Hashable, Source], sinks: dict[Hashable, Sink], phase: str
    ) -> None:
        mine = sum(one.nbytes for one in sums if one.rank == self.comm.rank)
        reads: dict[Hashable, int] = {}
        for one in sums:
            for term in one.terms:
                if term.rank == self.comm.rank:
                    reads[term.stream] = max(reads.get(term.stream, 0), term.nbytes)
        read = sum(reads.values())
        gathered = allgather_json(self.comm, [read, mine])
        total = sum(part[0] for part in gathered)
        cap, done = self.cap_bytes_s, 0
        rate = None if cap is None else max(cap * read / max(total, 1), 1.0)

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            share = done / read if read else 1.0
            self.progress(Progress(phase=phase, done_bytes=int(share * total), total_bytes=total))

        Flow(
            self.comm,
            sums,
            sources,
            sinks,
            throttle=Throttle(rate, SEGMENT_BYTES, stop=self.stop),
            stop=self.stop,
            passing=lambda: faults.point("rebuild.segment"),
            progress=count,
        ).run()

    def _shards(
        self,
        view: View,
        reader: PackageReader | None,
        gifts: Sequence[items.Gift],
        made: _Made,
        stack: contextlib.ExitStack,
    ) -> PackageReader:
        """Make the lost shards; returns what reads the own ones then."""
        one, me = view.own_set, self.comm.rank
        assert view.manifest is not None
        sizes = [package.nbytes for package in view.manifest.members]
        writer: PackageWriter | None = None
        with agreed(self.comm, f"making slots in {self.job_dir}"):
            faults.point("rebuild.open")
            if reader is None:
                writer = stack.enter_context(PackageWriter(self.job_dir, view.candidate.iteration, view.package))
        sources = self._sources(view, reader)
        sinks: dict[Hashable, Sink] = {}
        chunks: list[ChunkSink] = []
        if writer is not None:
            chunks = [
                ChunkSink(writer, one.geometry.chunk(writer.package.nbytes, c)[0]) for c in range(one.geometry.chunks)
            ]
            sinks.update({("chunk", column): chunk for column, chunk in enumerate(chunks)})
        self._flow(sums_of_lost(one, sizes), sources, sinks, "rebuild")
        self._take(gifts, reader, writer)
        with agreed(self.comm, "verifying what was rebuilt"):
            faults.point("rebuild.verify")
            if writer is not None:
                self._verify(writer, chunks)
            if self.stop():
                raise stopped("rebuild")
        with agreed(self.comm, f"publishing shards in {self.job_dir}"):
            if writer is not None:
                self._evict(writer, view.candidate)
                faults.point("rebuild.publish")
                writer.publish()
                reader = stack.enter_context(PackageReader(self.job_dir, view.candidate.iteration, view.package))
        assert reader is not None
        sets = view.sets
        made.ranks |= {other.ranks[index] for other in sets for index in other.lost}
        made.nbytes += sum(allgather_json(self.comm, sum(s.file_bytes for s in view.package.shards) if writer else 0))
        assert me == self.comm.rank
        return reader

    def _sources(self, view: View, reader: PackageReader | None) -> dict[Hashable, Source]:
        geometry = view.own_set.geometry
        sources: dict[Hashable, Source] = {}
        if reader is not None:
            for column in range(geometry.chunks):
                sources["chunk", column] = Chunk(reader, geometry.chunk(reader.package.nbytes, column)[0])
        if view.parity is not None:
            for parity in view.parity.manifest.parities:
                sources["parity", parity.stripe, parity.row] = view.parity.source(parity)
        return sources

    def _take(self, gifts: Sequence[items.Gift], reader: PackageReader | None, writer: PackageWriter | None) -> None:
        """Copy items that nodes hold in common to who lost them."""
        sources: dict[Hashable, Source] = {}
        sinks: dict[Hashable, Sink] = {}
        sums = []
        slots: dict[int, int] = {}
        for number, gift in enumerate(gifts):
            slot = slots[gift.taker] = slots.get(gift.taker, -1) + 1
            if self.comm.rank not in (gift.giver, gift.taker):
                continue
            if gift.giver == self.comm.rank and reader is not None:
                sources[number] = items.GiftSource(reader, gift)
            if gift.taker == self.comm.rank and writer is not None:
                sinks[number] = items.GiftSink(writer, gift)
            term = Term(rank=gift.giver, stream=number, nbytes=gift.nbytes, slot=slot)
            sums.append(Sum(rank=gift.taker, sink=number, nbytes=gift.nbytes, terms=(term,)))
        self._flow(sums, sources, sinks, "rebuild")

    def _verify(self, writer: PackageWriter, chunks: Sequence[ChunkSink]) -> None:
        package = writer.package
        for column, (chunk, expected) in enumerate(zip(chunks, package.blocks, strict=True)):
            if chunk.blocks() != expected:
                raise DataError(f"chunk {column} of {package.where} was rebuilt to other bytes than were protected")
        for shard, manifest, part in writer.drafts():
            with open(part, "rb") as file, mmap.mmap(file.fileno(), shard.file_bytes, access=mmap.ACCESS_READ) as data:
                contents.check_items(data, manifest, manifest.items, part)

    def _evict(self, writer: PackageWriter, candidate: Candidate) -> None:
        """Remove manifests of what is in the slots that are going to be replaced.

        Raises:
            TryAgainError: Somebody reads one of them.
        """
        slots = {shard.rank: shard.slot for shard in writer.package.shards}
        for other, ranks in sealed.listed(self.job_dir).items():
            for rank in ranks:
                path = paths.manifest(self.job_dir, other, rank)
                if rank not in slots:
                    continue
                if other != candidate.iteration:
                    try:
                        if ShardManifest.load(path).slot != slots[rank]:
                            continue
                    except (FileNotFoundError, DataError):
                        continue
                    with pins.exclude(self.job_dir, other) as mine:
                        if not mine:
                            raise TryAgainError(
                                f"somebody reads iteration {other} in slot {slots[rank]}, which rank {rank} needs",
                                mend="wait for that, then rebuild again",
                            )
                        with contextlib.suppress(FileNotFoundError):  # the agent has taken it
                            os.unlink(path)
                else:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)

    def _parities(self, view: View, reader: PackageReader, made: _Made, stack: contextlib.ExitStack) -> None:
        """Make the lost parities, then the manifests of their holders."""
        one, manifest = view.own_set, view.manifest
        assert manifest is not None
        if all(state.parity for other in view.sets for state in other.states):
            return
        sizes = [package.nbytes for package in manifest.members]
        index = one.ranks.index(self.comm.rank)
        place = self.nodes[self.comm.rank].place
        writer: ParityWriter | None = None
        with agreed(self.comm, f"making the parities in {self.job_dir}"):
            if not one.states[index].parity:
                laid_out = member.layout(one.geometry, index, sizes)
                writer = stack.enter_context(ParityWriter(self.job_dir, manifest.iteration, place, laid_out))
                self._check_newest(view, place)
        wanting = {rank for rank, state in zip(one.ranks, one.states, strict=True) if not state.parity}
        sums = [two for two in sums_of_set(one.geometry, one.ranks, sizes) if two.rank in wanting]
        sources: dict[Hashable, Source] = {
            column: Chunk(reader, one.geometry.chunk(reader.package.nbytes, column)[0])
            for column in range(one.geometry.chunks)
        }
        self._flow(sums, sources, dict(writer.sinks.items()) if writer is not None else {}, "parity")
        path = paths.member(self.job_dir, manifest.iteration, place)
        with agreed(self.comm, f"publishing {path}"):
            reader.check()
            if writer is not None:
                faults.point("rebuild.parity")
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                writer.publish()
                parities = writer.parities()
                replace(manifest, node_rank=place, parities=parities, created_s=now_s()).publish(path, sync=False)
        made.ranks |= {
            rank
            for other in view.sets
            for rank, state in zip(other.ranks, other.states, strict=True)
            if not state.parity
        }
        made.nbytes += sum(allgather_json(self.comm, sum(p.nbytes for p in writer.parities()) if writer else 0))

    def _check_newest(self, view: View, place: int) -> None:
        """Make sure that no encode of the same iteration came to its end since the survey: nobody else writes now."""
        job_id, attempt, created_s = view.candidate.order
        for one in member.listed(self.job_dir)[0]:
            newer = (one.job_id, one.attempt, one.created_s) > (job_id, attempt, created_s)
            same = (one.iteration, one.node_rank) == (view.candidate.iteration, place)
            if same and newer and one.token != view.candidate.token:
                raise TryAgainError(f"iteration {one.iteration} was encoded anew meanwhile", mend="rebuild again")


def sums_of_lost(view: SetView, sizes: Sequence[int]) -> list[Sum]:
    """Lost chunks of a set as sums of what is left: sinks and streams are ("chunk", column), ("parity", stripe, row).

    Args:
        view: The set; all that is lost can be had back.
        sizes: Of the members' packages.
    """
    geometry, sums, first = view.geometry, [], 0
    packages = dict(enumerate(sizes))
    for stripe in range(geometry.members):
        missing = view.missing(stripe)
        if not missing:
            continue
        recipes = geometry.recover(stripe, missing, view.parities(stripe))
        assert recipes is not None
        givers, holders = geometry.contributors(stripe), geometry.holders(stripe)
        for column, recipe in recipes.items():
            start, stop = geometry.chunk(sizes[givers[column]], column)
            nbytes = stop - start
            terms: list[tuple[int, Hashable, int, int, int]] = []
            for other, value in recipe.chunks.items():
                one, two = geometry.chunk(sizes[givers[other]], other)
                terms.append((givers[other], ("chunk", other), two - one, first + other, value))
            for row, value in recipe.parities.items():
                size = geometry.parity_bytes(packages, stripe)
                terms.append((holders[row], ("parity", stripe, row), size, first + geometry.chunks + row, value))
            sums.append(
                Sum(
                    rank=view.ranks[givers[column]],
                    sink=("chunk", column),
                    nbytes=nbytes,
                    terms=tuple(
                        Term(rank=view.ranks[m], stream=stream, nbytes=min(size, nbytes), slot=slot, coefficient=value)
                        for m, stream, size, slot, value in terms
                    ),
                )
            )
        first += geometry.chunks + geometry.losses
    return sums
