"""Communicator: what collective code needs of a group of processes. Implementations: :mod:`local`, :mod:`mpi`.

No method moves Python objects, only bytes: nothing is pickled. Errors in collective code go through :func:`agreed`:
all ranks learn of the error of any of them, then all raise the same one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from slurm_resil.core import errors
from slurm_resil.core.errors import RefusedError, ResilError, SpaceError, StoppedError, StorageError

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

MAX_WRITE_BYTES = 1 << 30  # of one rank in one collective call: MPI counts are 32 bit
_OK, _ASKED, _ERROR = 0, 1, 2
_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT))
_REFUSED = frozenset((errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG))
# fmt: off
_PASSING = frozenset((
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNRESET,
    errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.EAGAIN,
    errno.EBUSY, errno.EINTR, errno.ENOLCK, errno.ENXIO, errno.ENODEV,
))
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Byte ranges to write: ``data[source[i] : source[i] + length[i]]`` goes to ``target[i]`` in the file.

    Attributes:
        source: Offsets in the data, bytes.
        target: Offsets in the file, bytes; no two ranges overlap, the order is free.
        length: Sizes, bytes, all above 0.
    """

    source: Int64s
    target: Int64s
    length: Int64s

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return int(self.length.sum())

    @classmethod
    def joined(cls, parts: Sequence[Runs]) -> Runs:
        """Runs of several, one after the other."""
        none = np.empty(0, np.int64)
        return cls(
            source=np.concatenate([none, *(part.source for part in parts)]),
            target=np.concatenate([none, *(part.target for part in parts)]),
            length=np.concatenate([none, *(part.length for part in parts)]),
        )

    def merged(self) -> Runs:
        """Sort by place in the file and join what is adjacent on both sides."""
        if self.length.size == 0:
            return self
        order = np.argsort(self.target, kind="stable")
        source, target, length = self.source[order], self.target[order], self.length[order]
        joins = (target[1:] == target[:-1] + length[:-1]) & (source[1:] == source[:-1] + length[:-1])
        first = np.flatnonzero(np.concatenate(([True], ~joins)))
        return Runs(source=source[first], target=target[first], length=np.add.reduceat(length, first))


class File(Protocol):
    """A file that all ranks of a communicator have open for writing."""

    def write(self, data: Bytes, runs: Runs) -> None:
        """Write each rank's runs. Collective: also with nothing to write.

        Args:
            data: One-dimensional buffer.
            runs: What goes where; ``MAX_WRITE_BYTES`` at most.

        Raises:
            OSError: This rank's part was refused; other ranks may have succeeded, so agree afterwards.
        """

    def sync(self) -> None:
        """Make what any rank wrote readable by all and safe on storage. Collective.

        Raises:
            OSError: Storage refused, on this rank.
        """

    def close(self) -> None:
        """Close. Collective."""


class Transfer(Protocol):
    """A message on its way; its buffer belongs to it until :meth:`wait` has returned."""

    def wait(self) -> None:
        """Wait until a buffer that is sent may be written again, or one that is received into is full.

        Raises:
            ValueError: The message has another size than the buffer.
        """


class Communicator(Protocol):
    """A group of processes (or threads) that run the same code."""

    @property
    def rank(self) -> int:
        """Own number, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""

    def bcast(self, data: bytes, root: int = 0) -> bytes:
        """Return the root's bytes on every rank; the argument counts on the root only. Collective."""

    def allgather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by rank. Collective."""

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send ``parts[i]`` to rank i; return what was sent here, by sender. Collective."""

    def swap(self, values: Sequence[int]) -> list[int]:
        """Give ``values[i]`` (64 bit) to rank i; return what was given here, by giver. Collective."""

    def max(self, value: int) -> int:
        """Return the largest of all ranks' values (64 bit). Collective."""

    def isend(self, data: Bytes, to: int) -> Transfer:
        """Begin to send a contiguous buffer to another rank, which receives it in the order of sending.

        Not collective. Every transfer must be waited for, on both sides.
        """

    def irecv(self, out: Bytes, source: int) -> Transfer:
        """Begin to receive a message of exactly the buffer's size from another rank; see :meth:`isend`."""

    def open(self, path: str, hints: Mapping[str, str]) -> File:
        """Open an existing file for writing on all ranks. Collective.

        Args:
            path: The same file for every rank.
            hints: MPI-IO hints; unknown ones are ignored.

        Raises:
            OSError: It cannot be opened, the same on every rank.
        """

    def abort(self, code: int) -> NoReturn:
        """End all ranks at once: for faults of the program only, where others may wait for ever."""


def allgather_json(comm: Communicator, value: Any) -> list[Any]:
    """Gather plain values. Collective."""
    return [json.loads(part) for part in comm.allgather(json.dumps(value).encode())]


def bcast_json(comm: Communicator, value: Any, root: int = 0) -> Any:
    """Broadcast a plain value. Collective."""
    return json.loads(comm.bcast(json.dumps(value).encode() if comm.rank == root else b"", root))


def from_os_error(error: OSError, doing: str) -> ResilError:
    """Our error for one of the system.

    No space and quota are SpaceError; read-only and permissions the RefusedError of it; what may pass by itself is
    StorageError.
    """
    where = f"{error.filename}: " if error.filename else ""
    message = f"{doing}: {where}{error.strerror or error}"
    kinds = ((_SPACE, SpaceError), (_REFUSED, RefusedError), (_PASSING, StorageError))
    return next((kind for numbers, kind in kinds if error.errno in numbers), ResilError)(message)


def agree(comm: Communicator, error: ResilError | None, *, asked: bool = False) -> bool:
    """Tell all ranks how it went on each. Collective.

    Args:
        comm: Group.
        error: What went wrong on this rank, or None.
        asked: Whether this rank was asked to stop.

    Returns:
        Whether any rank was asked to stop.

    Raises:
        ResilError: Some rank had one; the same type and words on every rank, naming all that differ.
    """
    worst = comm.max(_ERROR if error is not None else _ASKED if asked else _OK)
    if worst < _ERROR:
        return worst == _ASKED
    raise _joined(allgather_json(comm, [_node(), _packed(error)])) from error


@contextlib.contextmanager
def agreed(comm: Communicator, doing: str) -> Iterator[None]:
    """Run a block on every rank, then agree on how it went; the block itself must not be left waiting by others.

    Args:
        comm: Group.
        doing: What the block does, for errors of the system: ``"writing"``.

    Raises:
        ResilError: As for :func:`agree`.
    """
    problem: ResilError | None = None
    try:
        yield
    except ResilError as error:
        problem = error
    except OSError as error:
        problem = from_os_error(error, doing)
    agree(comm, problem)


def stopped(what: str) -> StoppedError:
    """Error of a collective operation that was asked to stop."""
    return StoppedError(f"{what}: stopped as asked, nothing was published", mend="run it again")


def _packed(error: ResilError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    context = {key: value if isinstance(value, int | float) else str(value) for key, value in error.context.items()}
    return {"type": type(error).__name__, "message": error.message, "mend": error.mend, "context": context}


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _joined(packed: list[tuple[str, dict[str, Any] | None]]) -> ResilError:
    parts = [part for _, part in packed if part is not None]
    nodes: dict[str, list[str]] = {part["message"]: [] for part in parts}
    for node, part in packed:
        if part is not None and node not in nodes[part["message"]]:
            nodes[part["message"]].append(node)
    everywhere = len({node for node, _ in packed})  # paths are the same on all nodes: whose it is, is told by the name
    messages = [message + _on(message, where, everywhere) for message, where in nodes.items()]
    text = "; ".join(messages[:8]) + (f"; and {len(messages) - 8} more" if len(messages) > 8 else "")
    first = parts[0]
    kind = getattr(errors, first["type"], ResilError)
    if not (isinstance(kind, type) and issubclass(kind, ResilError)):
        kind = ResilError
    return kind(text, mend=first["mend"], **(first["context"] if len(messages) == 1 else {}))


def _on(message: str, nodes: list[str], of: int) -> str:
    if len(nodes) == of or (len(nodes) == 1 and nodes[0] in message):
        return ""
    return f" (on {', '.join(nodes[:4])}{f' and {len(nodes) - 4} more' if len(nodes) > 4 else ''})"
