"""Fetch: a drained checkpoint is staged into the nodes' burst buffers before their ranks restore.

Every byte is read once from the parallel file system, by one mover, and sent to the nodes that need it. Each block is
compared with its hash where it arrives; the manifest of the staged copy says which blocks are there and is published
last. What a fetch that did not come to its end has staged is compared with its hashes and kept by the next one.

A fetch is a help: what it does not stage the ranks read by themselves. So a node without room stages nothing, and a
fetch ends by itself when ranks have waited for it as long as they would take without it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from slurm_resil.comm.base import Communicator, agree, agreed, allgather_json, from_os_error
from slurm_resil.core import faults, layout, paths
from slurm_resil.core.errors import ConfigError, DataError, ResilError, SpaceError, TryAgainError
from slurm_resil.core.progress import Meter, Progress
from slurm_resil.drain import find, needs
from slurm_resil.drain.needs import Need
from slurm_resil.drain.spread import packed, pieces
from slurm_resil.drain.spreading import READ_BYTES, Source, Spreading, Verdict
from slurm_resil.drain.staging import Staging
from slurm_resil.format import sealed, staged
from slurm_resil.format.manifest import DrainedManifest

NEED, ALL = "need", "all"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a fetch came to, the same on all movers.

    Attributes:
        iteration: Of which checkpoint.
        staged_bytes: Bytes that were staged now, on all nodes together.
        kept_bytes: Bytes that were there before and are right.
        read_bytes: Bytes that each mover has read from the parallel file system.
        nodes: Nodes that have all that they need.
        of: Nodes that need something.
        seconds: Duration.
        words: What people should know.
    """

    iteration: int
    staged_bytes: int
    kept_bytes: int
    read_bytes: tuple[int, ...]
    nodes: int
    of: int
    seconds: float
    words: tuple[str, ...]


def fetch(
    comm: Communicator,
    *,
    run_dir: str,
    job_dir: str,
    iteration: int | None,
    env: Mapping[str, str],
    what: str = NEED,
    cap_bytes_s: float | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Outcome:
    """Stage a drained checkpoint. Collective over ``comm``, one rank for each node.

    Args:
        comm: Movers.
        run_dir: Run's directory on the parallel file system, the same for all.
        job_dir: Job's directory in each node's burst buffer; it is made where there is none.
        iteration: Which; None: the newest that is durable.
        env: Environment, for the node's name.
        what: :data:`NEED`: what the ranks of each node will read; :data:`ALL`: everything, on every node.
        cap_bytes_s: Limit of what all movers together read, bytes/s, until a rank waits for it; None: none.
        stop: Asked now and then on every rank; True on any rank ends the fetch.
        progress: Told how far it is, on every rank.

    Raises:
        DataError: Nothing is durable, or the drained file is damaged.
        TryAgainError: Stopped as asked.
        ConfigError: The run's directory does not exist.
        ResilError: Storage failed. All the same on every rank; what was staged until then can be used.
    """
    started = time.monotonic()
    job = _Fetch(comm, run_dir, job_dir, env, what)
    manifest = job.find(iteration)
    job.survey(manifest)
    with contextlib.ExitStack() as stack:
        return job.run(manifest, stack, started, cap_bytes_s, stop, Meter(progress))


class _Fetch:
    def __init__(self, comm: Communicator, run_dir: str, job_dir: str, env: Mapping[str, str], what: str) -> None:
        self.comm, self.run_dir, self.job_dir, self.what = comm, run_dir, job_dir, what
        self.node = env.get("SLURMD_NODENAME") or os.uname().nodename
        self.need = Need(np.zeros(0, np.bool_), 0)
        self.words: list[str] = []

    def find(self, iteration: int | None) -> DrainedManifest:
        """Manifest of the checkpoint, as rank 0 reads it."""
        found = b""
        with agreed(self.comm, f"reading {self.run_dir}"):
            if self.comm.rank == 0:
                found = self._newest(iteration).to_bytes()
        return DrainedManifest.from_bytes(self.comm.bcast(found), where="the manifest of the drained file")

    def _newest(self, iteration: int | None) -> DrainedManifest:
        try:
            names = os.listdir(self.run_dir)
        except (FileNotFoundError, NotADirectoryError) as error:
            words = f"the run's directory {self.run_dir} does not exist"
            raise ConfigError(words, mend="give the right --run-dir") from error
        there = {one for one in map(paths.parse_drained, names) if one is not None}
        for one in sorted(there if iteration is None else there & {iteration}, reverse=True):
            manifest = find.durable(self.run_dir, one)
            if manifest is not None:
                return manifest
        which = "no checkpoint" if iteration is None else f"iteration {iteration}"
        words = f"{which} in {self.run_dir} is {'' if iteration is None else 'not '}durable and whole"
        raise DataError(words, mend="look with `slurm-resil ckpt ls`")

    def survey(self, manifest: DrainedManifest) -> None:
        """See what this node needs."""
        newer: set[int] = set()
        protected = False
        with agreed(self.comm, f"looking at {self.job_dir}"):
            faults.point("fetch.survey")
            places = layout.load(self.run_dir)
            if self.what == ALL:
                self.need = needs.everything(manifest)
            elif places is None or self.node not in places.nodes:
                self.need = needs.everything(manifest, places.ranks_per_node if places else 1)
            else:
                first = places.node_rank(self.node) * places.ranks_per_node
                ranks = range(first, first + places.ranks_per_node)
                here = sealed.listed(self.job_dir)
                newer = {one for one, owners in here.items() if one > manifest.iteration and {*ranks} <= {*owners}}
                protected = needs.newer_here(self.job_dir, manifest.iteration)
                self.need = needs.need(manifest, self.job_dir, ranks, places.world_size)
        said = allgather_json(self.comm, [sorted(newer), protected])
        if self.what == NEED and (any(one[1] for one in said) or set.intersection(*(set(one[0]) for one in said))):
            self.need = Need(np.zeros(len(manifest.blocks), np.bool_), 0)
            if self.comm.rank == 0:
                self.words.append("a newer checkpoint is in the burst buffers: that will be restored")

    def run(
        self,
        manifest: DrainedManifest,
        stack: contextlib.ExitStack,
        started: float,
        cap_bytes_s: float | None,
        stop: Callable[[], bool],
        meter: Meter,
    ) -> Outcome:
        """Stage it."""
        staging = self._open(manifest, stack)
        lacks = self.need.blocks & ~staging.there if staging else np.zeros(len(manifest.blocks), np.bool_)
        plan = pieces(
            self.comm.allgather(packed(lacks)),
            len(manifest.blocks),
            max(1, READ_BYTES // manifest.block_bytes),
        )
        mine = sum(piece.stop - piece.first for piece in plan if piece.reader == self.comm.rank)
        share = mine / max(1, sum(piece.stop - piece.first for piece in plan))
        rate = None if cap_bytes_s is None else max(cap_bytes_s * share, 1.0)
        source = Source(
            os.path.join(self.run_dir, os.path.basename(manifest.file)),
            manifest,
            rate,
            lambda: stop() or staged.waited_for(self.job_dir),
        )
        stack.callback(source.close)
        moving = Spreading(
            self.comm,
            manifest,
            plan,
            source,
            staging,
            alone=allgather_json(self.comm, self.need.alone),
            waited_for=lambda: staged.waited_for(self.job_dir),
            stop=stop,
            meter=meter,
        )
        verdict = moving.run()
        with agreed(self.comm, f"publishing in {self.job_dir}"):
            faults.point("fetch.publish")
            self._publish(staging, moving)
        outcome = self._outcome(manifest, staging, source, verdict, started)
        agree(self.comm, source.problem)
        if verdict.asked:
            raise TryAgainError("fetch: stopped as asked; what is staged can be used", mend="run it again for the rest")
        return outcome

    def _open(self, manifest: DrainedManifest, stack: contextlib.ExitStack) -> Staging | None:
        """Open this node's copy; None if it needs none, or cannot have one."""
        if not self.need.blocks.any():
            return None
        try:
            with contextlib.ExitStack() as mine:
                faults.point("fetch.open")
                staging = mine.enter_context(Staging(self.job_dir, manifest))
                try:
                    staging.check_room(self.need.blocks)
                except SpaceError:
                    (staging.publish if staging.there.any() else staging.remove)()
                    raise
                stack.push(mine.pop_all())
        except (SpaceError, TryAgainError, OSError) as error:
            self._cannot(error)
            return None
        return staging

    def _cannot(self, error: ResilError | OSError) -> None:
        told = error if isinstance(error, ResilError) else from_os_error(error, "staging")
        self.words.append(f"{self.node} stages nothing, its ranks read the file: {told.message}")

    def _publish(self, staging: Staging | None, moving: Spreading) -> None:
        if staging is None:
            return
        if moving.problem is not None:
            self._cannot(moving.problem)
            staging.there[:] = False
            staging.remove()
            return
        if moving.wrong:
            self.words.append(f"{moving.wrong} blocks have reached {self.node} damaged, its ranks read them themselves")
        staging.publish()

    def _outcome(
        self,
        manifest: DrainedManifest,
        staging: Staging | None,
        source: Source,
        verdict: Verdict,
        started: float,
    ) -> Outcome:
        there, kept = (staging.size(staging.there), staging.kept_bytes) if staging else (0, 0)
        lacking = bool((self.need.blocks & ~staging.there).any()) if staging else bool(self.need.blocks.any())
        if verdict.slow and self.comm.rank == 0:
            self.words.append("the ranks waited as long as they take by themselves, and read the rest")
        said = allgather_json(
            self.comm,
            [
                max(0, there - kept),
                min(there, kept),
                source.read_bytes,
                bool(self.need.blocks.any()),
                lacking,
                self.words,
            ],
        )
        return Outcome(
            iteration=manifest.iteration,
            staged_bytes=sum(one[0] for one in said),
            kept_bytes=sum(one[1] for one in said),
            read_bytes=tuple(one[2] for one in said),
            nodes=sum(one[3] and not one[4] for one in said),
            of=sum(one[3] for one in said),
            seconds=time.monotonic() - started,
            words=tuple(text for one in said for text in one[5]),
        )
