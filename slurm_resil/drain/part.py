"""The unpublished file of a drain and its journal, as rank 0 of the movers keeps them.

The journal ``.ckpt-<iteration>.h5.journal`` says which ranges of the file were written and synced, by any mover: so it
means the same to another number of movers and to another plan. Each line is a JSON object with a hash of itself; the
first one says what the file is of and how it is laid out. What the journal claims is a hint of where to look: before it
counts, the bytes are read back and compared with the shards', and the whole file is compared with the seals at the end.
A line that is torn ends the journal. A file of anything else (another attempt, other contents) is never gone on with.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_resil.core import faults, fsio, paths
from slurm_resil.core.errors import DataError, ResilError, SpaceError
from slurm_resil.drain.between import gaps, hash_of
from slurm_resil.drain.claims import Claims
from slurm_resil.drain.lease import Lease
from slurm_resil.drain.plan import Plan
from slurm_resil.format.manifest import digest

VERSION = 1
_METADATA_BYTES = 1024  # of one dataset in the file, generous

Skeleton = Callable[[str, Plan], Sequence[int | None]]
"""Makes the file at a path with a dataset for each target and returns where the data of each starts."""

Identity = Mapping[str, Any]
"""What a file is of: run, job, attempt, iteration, world size, and hashes of its datasets and of all seals."""

_WORDS = {
    "version": "it was written by another version",
    "run_id": "it is of run {}",
    "job_id": "it is of job {}",
    "attempt": "it is of attempt {}",
    "world_size": "it is of {} ranks",
    "targets": "it holds other tensors",
    "contents": "the shards were sealed again since then",
}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A file that can be written to.

    Attributes:
        offsets: First byte of the data of each target; None for empty ones.
        file_bytes: Size of the file.
        claims: Ranges that the journal claims.
        instead: Why a file that was there is not gone on with; empty if there was none, or if it is.
        fresh: Whether it is new, and empty.
    """

    offsets: tuple[int | None, ...]
    file_bytes: int
    claims: Claims
    instead: str = ""
    fresh: bool = False


class Part:
    """See the module.

    Args:
        run_dir: Run's directory.
        iteration: Iteration that is drained.

    Attributes:
        path: The unpublished file.
        journal: Its journal.
    """

    def __init__(self, run_dir: str, iteration: int) -> None:
        self._run_dir, self._iteration = run_dir, iteration
        self.path = paths.drained_part(run_dir, iteration)
        self.journal = paths.drained_journal(run_dir, iteration)
        self._fd: int | None = None

    def prepare(self, identity: Identity, plan: Plan, skeleton: Skeleton) -> Prepared:
        """Find the file of a drain before this one, or make a new one.

        Raises:
            SpaceError: There is too little space.
            OSError: Storage refused.
        """
        self.close()
        identity = {"version": VERSION, **identity}
        found: Prepared | None = None
        instead = ""
        try:
            found = self._find(identity, plan)
        except DataError as error:
            instead = error.message
        if found is None:
            self.remove()
            self._make_room(plan, 0)
            found = self._make(identity, plan, skeleton, instead)
        else:
            self._make_room(plan, os.stat(self.path).st_blocks * 512)
        self._fd = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        return found

    def join(self, identity: Identity, plan: Plan) -> Prepared | None:
        """Open the file that another process has made for the same contents and is writing to; changes nothing there.

        Returns:
            It; None if there is none of these contents.

        Raises:
            OSError: It cannot be read.
        """
        self.close()
        try:
            found = self._look({"version": VERSION, **identity}, plan)[0]
            self._fd = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (DataError, FileNotFoundError):
            return None
        return found

    def add(self, claims: Claims) -> None:
        """Write down ranges that are on storage.

        Raises:
            OSError: Storage refused; a line may be torn, which the next :meth:`prepare` cuts off.
        """
        assert self._fd is not None
        view = memoryview(_line({"claims": claims.pack()}))
        while view:
            view = view[os.write(self._fd, view) :]
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the journal."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def publish(self) -> None:
        """Give the file its name. Its manifest, which makes it count, is still to come.

        Raises:
            OSError: Storage refused.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        faults.point("drain.rename")
        os.replace(self.path, paths.drained(self._run_dir, self._iteration))
        fsio.fsync_dir(self._run_dir)

    def forget(self) -> None:
        """Delete the journal of a file that is published; left behind it says nothing."""
        self.close()
        with contextlib.suppress(OSError):
            os.unlink(self.journal)

    def remove(self) -> None:
        """Delete both: nobody can go on with them.

        Raises:
            OSError: Storage refused.
        """
        self.close()
        for path in (self.journal, self.path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _make(self, identity: Identity, plan: Plan, skeleton: Skeleton, instead: str) -> Prepared:
        offsets = tuple(skeleton(self.path, plan))
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            size = os.fstat(fd).st_size
            frame = hash_of(fd, gaps(offsets, plan, size))
        finally:
            os.close(fd)
        header = {"identity": dict(identity), "offsets": offsets, "file_bytes": size, "frame": frame}
        faults.point("drain.journal")
        fsio.write_atomic(self.journal, _line(header))
        return Prepared(offsets=offsets, file_bytes=size, claims=Claims.none(), instead=instead, fresh=True)

    def _find(self, identity: Identity, plan: Plan) -> Prepared | None:
        """A file that can be gone on with; None if there is none.

        Raises:
            DataError: There is one of something else, or a damaged one.
        """
        if not os.path.lexists(self.journal):
            return None
        self._header(identity)  # what is of something else is left where it is
        self.take_back()
        found, good = self._look(identity, plan)
        if good < os.stat(self.journal).st_size:
            os.truncate(self.journal, good)
        return found

    def _header(self, identity: Identity) -> tuple[list[dict[str, Any]], int]:
        """Lines of the journal, the first of which is of ``identity``, and their bytes.

        Raises:
            FileNotFoundError: There is none.
            DataError: It is of something else.
        """
        lines, good = _lines(fsio.read_bytes(self.journal))
        if not lines:
            raise DataError("its journal is torn")
        try:
            known = dict(lines[0]["identity"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"its journal is none: {error}") from error
        for key, words in _WORDS.items():
            if known.get(key) != identity[key]:
                raise DataError(words.format(known.get(key)))
        return lines, good

    def _look(self, identity: Identity, plan: Plan) -> tuple[Prepared, int]:
        """A file as its journal has it, and the bytes of the journal that are not torn.

        Raises:
            FileNotFoundError: There is none.
            DataError: It is of something else, or damaged.
        """
        lines, good = self._header(identity)
        header = lines[0]
        try:
            offsets = tuple(header["offsets"])
            size, frame = int(header["file_bytes"]), str(header["frame"])
            claims = Claims.union(Claims.unpack(line["claims"]) for line in lines[1:])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"its journal is none: {error}") from error
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != size or hash_of(fd, gaps(offsets, plan, size)) != frame:
                raise DataError("its structure is damaged")
        finally:
            os.close(fd)
        return Prepared(offsets=offsets, file_bytes=size, claims=claims), good

    def take_back(self) -> None:
        """Give a file its old name whose publication ended between its rename and its manifest.

        Raises:
            DataError: There is no file.
        """
        if os.path.lexists(self.path):
            return
        final, bad = paths.drained(self._run_dir, self._iteration), paths.drained_bad(self._run_dir, self._iteration)
        if os.path.lexists(bad) or not os.path.lexists(final):
            raise DataError("there is a journal without its file")
        os.rename(final, self.path)

    def _make_room(self, plan: Plan, there: int) -> None:
        """See that there is space for what is missing; ``there`` bytes are taken by the file already."""
        need = max(0, plan.nbytes + _METADATA_BYTES * (len(plan.targets) + 8) - there)
        if _free(self._run_dir) < need:
            clear_older(self._run_dir, self._iteration)
        free = _free(self._run_dir)
        if free < need:
            raise SpaceError(
                f"{self._run_dir} has {free} bytes free, the checkpoint needs {need}",
                mend="free some space or choose another prefix",
                path=self._run_dir,
            )


def identity(plan: Plan, contents: str) -> dict[str, Any]:
    """What the file of a plan is of; ``contents`` is a hash of all seals."""
    head = plan.head
    rows = [[one.name, one.dtype, one.shape, one.rank] for one in plan.targets]
    return {
        "run_id": head.run_id,
        "job_id": head.job_id,
        "attempt": head.attempt,
        "iteration": head.iteration,
        "world_size": head.world_size,
        "targets": digest(json.dumps(rows, separators=(",", ":")).encode()),
        "contents": contents,
    }


def clear_older(run_dir: str, iteration: int) -> None:
    """Delete what drains of older iterations have left behind; what is at work has its lease and is left alone."""
    older = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(run_dir):
            parsed = paths.parse_of_drained(name)
            if parsed is not None and parsed[0] < iteration and parsed[1] in ("h5.part", "h5.journal"):
                older.add(parsed[0])
    for one in sorted(older):
        with contextlib.suppress(ResilError, OSError):
            lease = Lease(run_dir, one, owner="clearing up")
            try:
                Part(run_dir, one).remove()
            finally:
                lease.release()


def _free(path: str) -> int:
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def _line(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return f'{text[:-1]},"~":"{digest(text.encode())}"}}\n'.encode()


def _lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The lines up to the first that is torn, and where that begins."""
    lines: list[dict[str, Any]] = []
    good = 0
    for raw in data.splitlines(keepends=True):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(raw)
            if isinstance(value, dict) and raw == _line({key: one for key, one in value.items() if key != "~"}):
                lines.append(value)
                good += len(raw)
                continue
        break
    return lines, good
