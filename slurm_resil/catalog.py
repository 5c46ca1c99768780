"""What is restorable, where: sealed shards on this node, drained checkpoints on the parallel file system.

Presence of a manifest means valid. The manifest of a copy that turned out bad is moved away, with the reason beside it,
and so is never tried again. Which durable ones are deleted is for others to say, see :mod:`slurm_resil.core.retention`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_resil.core import faults, fsio, paths, spare
from slurm_resil.core.errors import DataError, ResilError
from slurm_resil.core.model import CheckpointState
from slurm_resil.core.retention import Checkpoint
from slurm_resil.format.manifest import DrainedManifest, ShardManifest

LOST = "lost"
LOST_KEPT = 16  # manifests of bad shards that stay on a node
REASON = ".reason"
_NO_FILE = ("missing", "truncated")  # faults of a checkpoint whose manifest is right


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def _write_reason(path: str, reason: str, *, sync: bool) -> None:
    with contextlib.suppress(OSError):
        fsio.write_json(path + REASON, {"reason": reason, "time_s": time.time()}, sync=sync)


class LocalCatalog:
    """Sealed shards of one job on this node.

    Args:
        job_dir: Job's directory in the burst buffer.
        run_id: Run that shards must belong to; default: whatever is there.
    """

    def __init__(self, job_dir: str, *, run_id: str | None = None) -> None:
        self.job_dir = job_dir
        self.run_id = run_id

    def sealed(self) -> dict[int, dict[int, str]]:
        """Paths of the manifests, by iteration and rank. By their names alone; :meth:`load` reads and checks one."""
        found: dict[int, dict[int, str]] = {}
        directory = os.path.join(self.job_dir, "manifests")
        for name in _names(directory):
            parsed = paths.parse_manifest(name)
            if parsed is not None:
                found.setdefault(parsed[0], {})[parsed[1]] = os.path.join(directory, name)
        return found

    def load(self, iteration: int, rank: int) -> ShardManifest:
        """Read a manifest.

        Raises:
            FileNotFoundError: There is none.
            DataError: Torn, renamed (``context["fault"]``), or of another run.
        """
        path = paths.manifest(self.job_dir, iteration, rank)
        manifest = ShardManifest.load(path)
        if (manifest.iteration, manifest.rank) != (iteration, rank):
            raise DataError(
                f"{path} was renamed: it is of iteration {manifest.iteration}, rank {manifest.rank}", fault="renamed"
            )
        if self.run_id is not None and manifest.run_id != self.run_id:
            raise DataError(f"{path} is swapped: it is of run {manifest.run_id}, not {self.run_id}", fault="swapped")
        return manifest

    def all_ranks(self, iteration: int) -> list[ShardManifest]:
        """Read the manifests of all ranks that saved an iteration, where all of them are on this node.

        Raises:
            FileNotFoundError: One is not here.
            DataError: As for :meth:`load`.
        """
        first = self.load(iteration, 0)
        return [first, *(self.load(iteration, rank) for rank in range(1, first.world_size))]

    def durable(self) -> set[int]:
        """Iterations that the mover has marked durable on this node."""
        names = _names(os.path.join(self.job_dir, "durable"))
        return {iteration for name in names if (iteration := paths.parse_durable(name)) is not None}

    def encoded(self, node_rank: int) -> set[int]:
        """Iterations of which a node at this place has its part of the redundancy. By the names alone."""
        found = (paths.parse_member(name) for name in _names(paths.redundancy(self.job_dir)))
        return {one[0] for one in found if one is not None and one[1:] == (node_rank, "json")}

    def forget(self, iteration: int) -> None:
        """Remove what this node has of the redundancy of an iteration: the manifests first.

        Raises:
            OSError: The file system refused.
        """
        directory = paths.redundancy(self.job_dir)
        found = [(name, parsed) for name in _names(directory) if (parsed := paths.parse_member(name)) is not None]
        for name, _ in sorted((one for one in found if one[1][0] == iteration), key=lambda one: one[1][2] != "json"):
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path) if name.endswith(".json") else spare.retire(path)

    def quarantine(self, iteration: int, rank: int, reason: str) -> str | None:
        """Move a bad shard's manifest out of the candidates; its slot stays as evidence until it is reused.

        Returns:
            Where the manifest went, None if it was gone already.
        """
        directory, name = os.path.split(paths.manifest(self.job_dir, iteration, rank))
        lost = os.path.join(directory, LOST)
        os.makedirs(lost, mode=0o700, exist_ok=True)
        target = os.path.join(lost, f"{name}.{time.time_ns()}")
        try:
            os.rename(os.path.join(directory, name), target)
        except FileNotFoundError:
            return None
        _write_reason(target, reason, sync=False)
        self._forget(lost)
        return target

    @staticmethod
    def _forget(lost: str) -> None:
        """Bound the evidence: it is memory, where the burst buffer is one."""
        by_age = sorted((int(name.rpartition(".")[2]), name) for name in _names(lost) if name[-19:].isdecimal())
        for _, name in by_age[:-LOST_KEPT]:
            for path in (os.path.join(lost, name), os.path.join(lost, name + REASON)):
                with contextlib.suppress(OSError):
                    os.unlink(path)


@dataclass(frozen=True, kw_only=True)
class EncodedPart:
    """One node's part of an encode, as its manifest says.

    Attributes:
        token: Which encode.
        places: Nodes of the run.
        node_rank: Place of this node.
        members: Places of its set.
        losses: Nodes that the set may lose.
        scheme: As it was asked for.
        nbytes: Size of the parities that it holds.
    """

    token: str
    places: int
    node_rank: int
    members: tuple[int, ...]
    losses: int
    scheme: str
    nbytes: int


def state(
    *,
    durable: bool,
    draining: bool,
    ranks: Collection[int],
    world_size: int,
    parts: Sequence[EncodedPart],
    everywhere: bool,
    newest: bool,
) -> CheckpointState:
    """State of a checkpoint, from what all tiers hold of it.

    Args:
        durable: There is a whole drained file.
        draining: There is a file of a drain that is at work, or has not come to its end.
        ranks: Ranks whose shards are on nodes that were looked at.
        world_size: Number of ranks; 0 if nothing says it.
        parts: What those nodes hold of its redundancy.
        everywhere: Whether all nodes were looked at. If not, shards that were not seen are not lost.
        newest: Whether ranks may be sealing it: there is no later one that all have sealed.
    """
    if durable:
        return CheckpointState.DURABLE
    if draining:
        return CheckpointState.DRAINING
    complete = bool(ranks) and set(range(world_size)) <= set(ranks)
    if complete and any(_encoded_by_all(encode) for encode in _encodes(parts)):
        return CheckpointState.PROTECTED
    if complete or (ranks and not everywhere):
        return CheckpointState.LOCAL
    if everywhere and rebuildable(ranks=ranks, world_size=world_size, parts=parts):
        return CheckpointState.PROTECTED  # this is what it was protected for
    return CheckpointState.WRITING if ranks and newest else CheckpointState.LOST


def rebuildable(*, ranks: Collection[int], world_size: int, parts: Sequence[EncodedPart]) -> bool:
    """Whether shards that are not among ``ranks`` can be had back from what is left of an encode.

    By what manifests say, and with as many ranks on each node: whether bytes are right, the rebuild finds out.
    """
    for encode in _encodes(parts):
        places, known = encode[0].places, {part.node_rank for part in encode}
        per_node = world_size // places
        sets = {part.members: part.losses for part in encode}
        whole = {p for p in known if set(range(p * per_node, (p + 1) * per_node)) <= set(ranks)}
        all_known = {place for members in sets for place in members} == set(range(places))
        if all_known and all(len(set(members) - whole) <= losses for members, losses in sets.items()):
            return True
    return False


def _encodes(parts: Sequence[EncodedPart]) -> list[list[EncodedPart]]:
    found: dict[str, list[EncodedPart]] = {}
    for part in parts:
        found.setdefault(part.token, []).append(part)
    return list(found.values())


def _encoded_by_all(encode: Sequence[EncodedPart]) -> bool:
    return {part.node_rank for part in encode} == set(range(encode[0].places))


@dataclass(frozen=True, kw_only=True)
class Stock:
    """What a run's directory holds of drained checkpoints; iterations are newest first.

    Attributes:
        whole: Those that can be restored, as far as their manifests and the sizes of their files say.
        spoiled: Those that cannot, though there is a manifest, and why.
        evidence: Those that were found bad and set aside, or whose file is missing or truncated.
        unfinished: Those of which there are files of a drain or a deletion that has not come to its end, or is at work.
    """

    whole: tuple[Checkpoint, ...]
    spoiled: Mapping[int, str]
    evidence: tuple[int, ...]
    unfinished: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Explained:
    """One checkpoint of a run and what is known about it."""

    iteration: int
    state: CheckpointState
    why: str


class RunCatalog:
    """Drained checkpoints of a run.

    Args:
        run_dir: Run's directory on the parallel file system.
        run_id: Run that they must belong to; default: whatever is there.
    """

    def __init__(self, run_dir: str, *, run_id: str | None = None) -> None:
        self.run_dir = run_dir
        self.run_id = run_id
        self._known: dict[int, tuple[tuple[int, int, int], Checkpoint, str, int]] = {}

    def durable(self) -> list[int]:
        """Iterations with a published manifest, newest first. By their names alone."""
        found = (paths.parse_drained(name) for name in _names(self.run_dir))
        return sorted((iteration for iteration in found if iteration is not None), reverse=True)

    def load(self, iteration: int) -> DrainedManifest:
        """Read a manifest and check that its file is there and whole in size.

        Raises:
            FileNotFoundError: There is no manifest.
            DataError: Torn, renamed, or the file is missing or truncated (``context["fault"]``).
        """
        path = paths.drained_manifest(self.run_dir, iteration)
        manifest = DrainedManifest.load(path)
        if manifest.iteration != iteration:
            raise DataError(f"{path} was renamed: it is of iteration {manifest.iteration}", fault="renamed")
        if self.run_id is not None and manifest.run_id != self.run_id:
            raise DataError(f"{path} is swapped: it is of run {manifest.run_id}, not {self.run_id}", fault="swapped")
        self._check_file(iteration, manifest.file, manifest.file_bytes)
        return manifest

    def _check_file(self, iteration: int, name: str, file_bytes: int) -> None:
        file = os.path.join(self.run_dir, os.path.basename(name))
        try:
            size = os.stat(file, follow_symlinks=False).st_size
        except FileNotFoundError as error:
            path = paths.drained_manifest(self.run_dir, iteration)
            raise DataError(f"{file} is missing, though {path} is there", fault="missing") from error
        if size != file_bytes:
            raise DataError(f"{file} is truncated: {size} bytes of {file_bytes}", fault="truncated")

    def newest_restorable(self, *, before: int | None = None, exclude: Collection[int] = ()) -> DrainedManifest | None:
        """Find the newest drained checkpoint whose manifest and file size are right; bad ones are passed over.

        Args:
            before: Only older iterations.
            exclude: Iterations not to take, for example those that failed already.
        """
        for iteration in self.durable():
            if iteration in exclude or (before is not None and iteration >= before):
                continue
            with contextlib.suppress(ResilError, FileNotFoundError):
                return self.load(iteration)
        return None

    def explain(self) -> list[Explained]:
        """Say of every checkpoint, lost and unfinished ones too, what it is and why; newest first."""
        found = []
        for iteration in self.durable():
            try:
                manifest = self.load(iteration)
                why = f"{manifest.file_bytes} bytes by {manifest.world_size} ranks"
                found.append(Explained(iteration=iteration, state=CheckpointState.DURABLE, why=why))
            except FileNotFoundError:
                continue
            except ResilError as error:
                found.append(Explained(iteration=iteration, state=CheckpointState.LOST, why=error.message))
        whole = {entry.iteration for entry in found}
        for name in _names(self.run_dir):
            if name.endswith(".h5.part"):
                digits = name.removeprefix(".ckpt-").removesuffix(".h5.part")
                if digits.isdecimal() and int(digits) not in whole:
                    why = f"{name}: a drain did not come to its end, or is at work"
                    found.append(Explained(iteration=int(digits), state=CheckpointState.DRAINING, why=why))
            parsed = paths.parse_of_drained(name)
            if parsed is not None and parsed[1] == "bad":
                reason = "it did not verify when it was restored"
                with contextlib.suppress(ResilError, OSError, KeyError, TypeError):
                    reason = str(fsio.read_json(os.path.join(self.run_dir, name + REASON))["reason"])
                found.append(Explained(iteration=parsed[0], state=CheckpointState.LOST, why=reason))
        return sorted(found, key=lambda entry: -entry.iteration)

    def quarantine(self, iteration: int, reason: str) -> str | None:
        """Move a bad checkpoint's manifest out of the candidates; its file stays as evidence.

        Returns:
            Where the manifest went, None if another rank was faster.
        """
        target = paths.drained_bad(self.run_dir, iteration)
        try:
            os.rename(paths.drained_manifest(self.run_dir, iteration), target)  # first: the reason is a courtesy
        except FileNotFoundError:
            return None
        _write_reason(target, reason, sync=True)
        fsio.fsync_dir(self.run_dir)
        return target

    def stock(self) -> Stock:
        """Look at everything that the run's directory holds of drained checkpoints.

        Raises:
            DataError: A manifest cannot be read by this user: nothing is known then.
            OSError: The directory or something in it cannot be read: nothing is known then.
        """
        names: dict[int, set[str]] = {}
        for name in os.listdir(self.run_dir):
            parsed = paths.parse_of_drained(name)
            if parsed is not None:
                dots = "." if name.startswith(".") else ""
                names.setdefault(parsed[0], set()).add(dots + parsed[1])
        whole, spoiled = [], {}
        for iteration in sorted(names, reverse=True):
            if "json" not in names[iteration]:
                continue
            try:
                whole.append(replace(self._checkpoint(iteration), by_hand="keep" in names[iteration]))
            except FileNotFoundError:
                names[iteration].discard("json")  # deleted meanwhile
            except DataError as error:
                if error.context.get("fault") == "unreadable":
                    raise
                spoiled[iteration] = error
        evidence = {iteration for iteration, kinds in names.items() if "bad" in kinds}
        evidence |= {iteration for iteration, error in spoiled.items() if error.context.get("fault") in _NO_FILE}
        held = {one.iteration for one in whole} | set(spoiled) | evidence
        return Stock(
            whole=tuple(whole),
            spoiled={iteration: error.message for iteration, error in spoiled.items()},
            evidence=tuple(sorted(evidence - {one.iteration for one in whole}, reverse=True)),
            unfinished=tuple(
                sorted(
                    (
                        iteration
                        for iteration, kinds in names.items()
                        if ".lease" in kinds
                        or any(_unfinished(kind) for kind in kinds)
                        or ("h5" in kinds and iteration not in held)
                    ),
                    reverse=True,
                )
            ),
        )

    def _checkpoint(self, iteration: int) -> Checkpoint:
        """A whole checkpoint; its manifest is read once, for it never changes."""
        info = os.stat(paths.drained_manifest(self.run_dir, iteration), follow_symlinks=False)
        key = (info.st_ino, info.st_mtime_ns, info.st_size)
        known = self._known.get(iteration)
        if known is None or known[0] != key:
            manifest = self.load(iteration)
            metrics = {name: float(value) for name, value in manifest.metrics.items()}
            made = Checkpoint(iteration=iteration, created_s=float(manifest.created_s), metrics=metrics)
            known = self._known[iteration] = (key, made, manifest.file, manifest.file_bytes)
        else:
            self._check_file(iteration, known[2], known[3])
        return known[1]

    def remove(self, iteration: int) -> int:
        """Delete a drained checkpoint: its manifest first, so that what is left at any moment is whole or none.

        Returns:
            Bytes of its file, as far as it was there.

        Raises:
            OSError: The file system refused.
        """
        _unlink(paths.drained_manifest(self.run_dir, iteration))
        fsio.fsync_dir(self.run_dir)
        size = _unlink(paths.drained(self.run_dir, iteration))
        _unlink(paths.drained_kept(self.run_dir, iteration))
        return size

    def remove_evidence(self, iteration: int) -> int:
        """Delete what was kept of a bad checkpoint: the file first, which takes the space.

        Nothing goes if it was drained again meanwhile, or if its manifest says something else than before.

        Returns:
            Bytes of its file, as far as it was there.

        Raises:
            OSError: The file system refused.
        """
        try:
            self.load(iteration)
            return 0
        except FileNotFoundError:
            pass
        except DataError as error:
            if error.context.get("fault") not in _NO_FILE:
                return 0
        size = _unlink(paths.drained(self.run_dir, iteration))
        _unlink(paths.drained_manifest(self.run_dir, iteration))
        _unlink(f"{paths.drained_bad(self.run_dir, iteration)}{REASON}")
        _unlink(paths.drained_bad(self.run_dir, iteration))
        return size

    def remove_unfinished(self, iteration: int) -> int:
        """Delete what drains or deletions that did not come to their end have left of an iteration.

        A file goes only if it has no manifest and is no evidence.

        Returns:
            Bytes.

        Raises:
            OSError: The file system refused.
        """
        size = 0
        for name in os.listdir(self.run_dir):
            parsed = paths.parse_of_drained(name)
            if parsed is not None and parsed[0] == iteration and name.startswith(".") and _unfinished("." + parsed[1]):
                size += _unlink(os.path.join(self.run_dir, name))
        marks = (paths.drained_manifest(self.run_dir, iteration), paths.drained_bad(self.run_dir, iteration))
        if not any(map(os.path.lexists, marks)):
            size += _unlink(paths.drained(self.run_dir, iteration))
        return size


def _unfinished(kind: str) -> bool:
    """Whether a hidden file about a checkpoint is of a drain that has not come to its end, or of its publication."""
    return kind in (".h5.part", ".h5.journal") or (kind.startswith(".json.") and kind.endswith(".tmp"))


def _unlink(path: str) -> int:
    """Delete a file that may be gone; returns the bytes that it had."""
    faults.point("catalog.delete")
    try:
        size = os.stat(path, follow_symlinks=False).st_size
        os.unlink(path)
    except FileNotFoundError:
        return 0
    return size
