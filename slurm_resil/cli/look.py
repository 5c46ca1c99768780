"""What one node's burst buffer holds of a job: looked at here, and told by a node to who asks from elsewhere."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from slurm_resil.catalog import EncodedPart, RunCatalog
from slurm_resil.cli.places import names
from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError, ResilError
from slurm_resil.drain import check
from slurm_resil.format import sealed, stamp
from slurm_resil.format.manifest import ShardManifest
from slurm_resil.redundancy import check as protection
from slurm_resil.redundancy import member
from slurm_resil.redundancy import tidy as tidying
from slurm_resil.redundancy.tidy import Waste

MARK = "slurm-resil-node"
_LINE_CHARS = 700  # srun cuts and mixes lines of more than 1 KiB


@dataclass(kw_only=True)
class Held:
    """What a node holds of one iteration.

    Attributes:
        iteration: Which.
        ranks: Ranks with a sound manifest.
        world_size: Number of ranks of the checkpoint; 0 if nothing says it.
        nbytes: Size of these shards.
        created_s: When they were sealed, Unix seconds.
        attempt: Newest attempt that has sealed one of them, -1 if there are none.
        metrics: What the training said of it; of several ranks that gave one the lowest counts.
        marked: Whether there is a mark that it is durable.
        parts: What is held to protect other nodes.
        encoded: Whether there is something of an encode, be it sound or not: all ranks had sealed then.
        staged_bytes: Space that a staged copy of the drained file takes.
        faults: What is wrong, by a look.
        flaws: What is wrong with the bytes; None if they were not read.
        unread: What could not be read, so that nothing is known of it.
    """

    iteration: int
    ranks: list[int] = field(default_factory=list)
    world_size: int = 0
    nbytes: int = 0
    created_s: float = 0.0
    attempt: int = -1
    metrics: Mapping[str, float] = field(default_factory=dict)
    marked: bool = False
    parts: list[EncodedPart] = field(default_factory=list)
    encoded: bool = False
    staged_bytes: int = 0
    faults: list[str] = field(default_factory=list)
    flaws: list[str] | None = None
    unread: str = ""

    @property
    def parity_bytes(self) -> int:
        """Size of what is held for others."""
        return sum(part.nbytes for part in self.parts)


@dataclass(kw_only=True)
class NodeView:
    """What a node holds.

    Attributes:
        node: Its name.
        job_dir: Job's directory in its burst buffer.
        held: By iteration.
        faults: What is wrong and of no iteration.
        free_bytes: Space that is left there; None if that cannot be told.
        waste: Redundancy that protects nothing any more, if that was asked for.
        left: Files of it that could not be removed, and why; None if nothing was to be removed.
    """

    node: str
    job_dir: str
    held: list[Held] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    free_bytes: int | None = None
    waste: list[Waste] = field(default_factory=list)
    left: dict[str, str] | None = None

    def lines(self) -> Iterator[str]:
        """Tell it in lines that are short enough for srun."""
        packed = base64.b64encode(zlib.compress(json.dumps(asdict(self)).encode())).decode()
        parts = [packed[at : at + _LINE_CHARS] for at in range(0, len(packed), _LINE_CHARS)]
        for number, part in enumerate(parts):
            yield f"{MARK} {self.node} {number} {len(parts)} {part}"

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any]) -> Self:
        """Make one of its JSON."""
        held = [
            Held(**{**one, "parts": [EncodedPart(**{**p, "members": tuple(p["members"])}) for p in one["parts"]]})
            for one in raw["held"]
        ]
        return cls(**{**raw, "held": held, "waste": [Waste(**one) for one in raw["waste"]]})


def told(text: str) -> dict[str, NodeView]:
    """Read what nodes have told by :meth:`NodeView.lines`, in any order, with anything between; only whole ones."""
    pieces: dict[str, dict[int, str]] = {}
    count: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split(" ")
        if len(words) == 5 and words[0] == MARK and words[2].isdecimal() and words[3].isdecimal():
            pieces.setdefault(words[1], {})[int(words[2])] = words[4]
            count[words[1]] = int(words[3])
    views = {}
    for node, parts in pieces.items():
        if len(parts) == count[node]:
            try:
                raw = json.loads(zlib.decompress(base64.b64decode("".join(parts[i] for i in sorted(parts)))))
                views[node] = NodeView.from_raw(raw)
            except (ValueError, KeyError, TypeError, zlib.error):
                continue
    return views


def look(job_dir: str, node: str) -> NodeView:
    """Look at this node, without reading the shards.

    Raises:
        ConfigError: A directory cannot be listed.
    """
    found: dict[int, Held] = {}
    view = NodeView(node=node, job_dir=job_dir)

    def at(iteration: int) -> Held:
        return found.setdefault(iteration, Held(iteration=iteration))

    names(job_dir)  # what cannot be listed is not empty
    for name in names(os.path.join(job_dir, "manifests")):
        if (parsed := paths.parse_manifest(name)) is not None:
            at(parsed[0])
    for iteration, held in found.items():
        _shards(job_dir, iteration, held)
    for name in names(os.path.join(job_dir, "durable")):
        if (marked := paths.parse_durable(name)) is not None:
            at(marked).marked = True
    for name in names(paths.fetched(job_dir)):
        if (staged := paths.parse_drained(name)) is not None:
            with contextlib.suppress(OSError):
                at(staged).staged_bytes = os.stat(paths.staged(job_dir, staged), follow_symlinks=False).st_blocks * 512
    try:
        for iteration, part in member.found(job_dir):
            _part(job_dir, at(iteration), part)
    except DataError as error:
        view.faults.append(error.message)
    try:
        space = os.statvfs(job_dir)
        view.free_bytes = space.f_bavail * space.f_frsize
    except OSError:
        view.free_bytes = None
    view.held = [found[iteration] for iteration in sorted(found, reverse=True)]
    return view


def _shards(job_dir: str, iteration: int, held: Held) -> None:
    good, bad = sealed.load(job_dir, iteration)
    held.faults += bad
    for one in sorted(good, key=lambda one: -one.rank):
        fault = _slot_fault(job_dir, one)
        if fault:
            held.faults.append(fault)
        held.ranks.insert(0, one.rank)
        held.nbytes += one.nbytes
        held.world_size = max(held.world_size, one.world_size)
        held.created_s = max(held.created_s, one.created_s)
        held.attempt = max(held.attempt, one.attempt)
        held.metrics = {**held.metrics, **one.metrics}


def _slot_fault(job_dir: str, manifest: ShardManifest) -> str:
    """What is wrong with a slot by its stamp. Nobody is kept from writing it again: its manifest is gone then."""
    path = os.path.join(job_dir, "slots", os.path.basename(manifest.slot))
    head = bytearray(stamp.BYTES)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fsio.pread_into(fd, memoryview(head), 0, path)
        finally:
            os.close(fd)
        stamp.check(head, manifest, path)
        return ""
    except FileNotFoundError:
        words = f"slot {path} of rank {manifest.rank} is missing"
    except OSError as error:
        words = f"slot {path} of rank {manifest.rank} cannot be read: {error.strerror}"
    except ResilError as error:
        words = error.message
    return words if os.path.lexists(paths.manifest(job_dir, manifest.iteration, manifest.rank)) else ""


def _part(job_dir: str, held: Held, part: member.MemberManifest | str) -> None:
    held.encoded = True
    if isinstance(part, str):
        held.faults.append(part)
        return
    flaw = protection.outer_flaw(job_dir, part)
    if flaw:
        held.faults.append(flaw)
        return
    held.world_size = max(held.world_size, part.world_size)
    held.parts.append(
        EncodedPart(
            token=part.token,
            places=part.places,
            node_rank=part.node_rank,
            members=tuple(package.node_rank for package in part.members),
            losses=part.losses,
            scheme=part.scheme,
            nbytes=part.file_bytes,
        )
    )


def tidy(view: NodeView, run_dir: str, *, yes: bool) -> None:
    """Find redundancy on this node that protects nothing any more; says in the view what.

    Args:
        view: As looked at a moment ago.
        run_dir: Run's directory: what is older than its newest checkpoint is needed by nobody.
        yes: Remove it; what is left of it is in ``view.left`` then, and in ``view.waste`` what went.
    """
    try:
        newest = next(iter(RunCatalog(run_dir, run_id=os.path.basename(os.path.abspath(run_dir))).stock().whole), None)
        view.waste = tidying.waste(view.job_dir, newest.iteration if newest else None)
        if yes:
            view.waste, view.left = tidying.remove(view.job_dir, view.waste)
    except (OSError, ResilError) as error:
        view.faults.append(f"redundancy in {view.job_dir} cannot be cleared away: {error}")


def read(
    view: NodeView, iterations: Collection[int], *, deep: bool, done: Callable[[int], None] = lambda _: None
) -> None:
    """Read this node's shards and parities in full and compare every hash; says in the view what is wrong.

    Args:
        view: As looked at a moment ago.
        iterations: Which; none: all.
        deep: Also HDF5's own view of the slots, and the shards against what was protected of them.
        done: Told the bytes that were read.
    """
    from slurm_resil.drain import deep as deeper  # h5py

    for held in view.held:
        if iterations and held.iteration not in iterations:
            continue
        held.flaws = []
        try:
            if held.ranks:
                held.flaws += check.shard_flaws(view.job_dir, held.iteration, done)
                if deep:
                    held.flaws += deeper.slot_flaws(view.job_dir, held.iteration)
            if held.parts:
                held.flaws += protection.flaws(view.job_dir, held.iteration, packages=deep, done=done)
        except OSError as error:
            held.unread = f"{os.fsdecode(error.filename or view.job_dir)} cannot be read: {error.strerror}"
