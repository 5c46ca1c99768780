"""The control page: one small mapped file per node, through which ranks and agent agree without a system call.

The page is an array of 64-bit words. Words of the head are written by the agent only; each rank has a block of
its own, one cache line long, that only this rank writes. On x86-64 and AArch64 an aligned 64-bit store is not torn.

The race that matters: a rank stores its iteration and then loads the proposal, while the agent stores a proposal
and then loads the iterations. Without a full barrier both can miss each other. The rank runs Python and cannot
issue a fence, so the agent does it for both sides with ``membarrier``: the expedited kind if all ranks have registered
for it (microseconds, and it works on nohz_full processors), else the global kind (tens of milliseconds).

Head words: see ``MAGIC`` to ``DURABLE``; rank block words: see ``ITERATION`` to ``WAITING``.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform

from slurm_resil.core.errors import DataError, ServiceError

WORD_BYTES = 8
MAGIC_VALUE = 0x52_45_53_49_4C_31  # "RESIL1"

# head, written by the agent
MAGIC = 0
RANKS = 1  # number of rank blocks
EPOCH = 2  # epoch of the proposal; changes with every proposal
PROPOSAL = 3  # iteration at which all would save, 0 when nothing is asked
DECISION = 4  # OPEN, COMMIT or ABORT, for EPOCH
STOP = 5  # 1 when training must end after PROPOSAL is saved
SEALED_ALL = 6  # newest iteration that all ranks of the run have sealed
AGENT_BEAT = 7  # the agent's monotonic clock in ms, refreshed about once a second
DEADLINE = 8  # Unix time in ms by which a stop must be over, 0 if there is none
FAILED = 9  # newest iteration that was given up: it will never be in SEALED_ALL
VOTED = 10  # epoch for which the agent has said yes
CYCLE = 11  # launch of the ranks that the page is for
ATTEMPT = 12  # both plus one, 0: not said yet
GOING = 13  # number of the restore plan that the ranks have started from, 0 before
PROTECTED = 14  # newest iteration that survives the loss of nodes
DURABLE = 15  # newest iteration that is durable
HEAD_WORDS = 16

# block of a rank, written by that rank
ITERATION = 0  # newest published iteration
SAVED = 1  # newest iteration handed over for sealing
PID = 2
FENCED = 4  # 1 once this process has registered for expedited barriers
WAITING = 3  # epoch of the decision that the rank waits for, 0 if it does not wait
BLOCK_WORDS = 8

OPEN, COMMIT, ABORT = 0, 1, 2

_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_CMD_GLOBAL, _CMD_GLOBAL_EXPEDITED, _CMD_REGISTER_GLOBAL_EXPEDITED = 1, 2, 4


class ControlPage:
    """The page as mapped words: ``page.words[index]`` reads and writes one 64-bit word."""

    def __init__(self, path: str, ranks: int, map_: mmap.mmap, *, lock_fd: int | None = None) -> None:
        self.path = path
        self.ranks = ranks
        self._map = map_
        self._lock_fd = lock_fd
        self.words = memoryview(map_).cast("Q")

    @staticmethod
    def size_bytes(ranks: int) -> int:
        """Size of a page for ``ranks`` local ranks."""
        words = HEAD_WORDS + ranks * BLOCK_WORDS
        return -(-words * WORD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE

    @classmethod
    def create(cls, path: str, ranks: int) -> ControlPage:
        """Make a fresh page at ``path`` (replacing an old one, which stale ranks then keep for themselves)."""
        temp = f"{path}.{os.getpid()}.tmp"
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, cls.size_bytes(ranks))
            page = cls(path, ranks, mmap.mmap(fd, cls.size_bytes(ranks)))
        finally:
            os.close(fd)
        page.words[RANKS] = ranks
        page.words[MAGIC] = MAGIC_VALUE
        os.replace(temp, path)
        return page

    @classmethod
    def open(cls, path: str, *, occupy: bool = False) -> ControlPage:
        """Map the page that the agent made.

        Args:
            path: Its file.
            occupy: Keep a shared lock on it until :meth:`close` or the end of the process: a rank trains by this page.

        Raises:
            FileNotFoundError: No agent has made one.
            DataError: The file is not a control page.
        """
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < HEAD_WORDS * WORD_BYTES:
                raise DataError(f"{path} is not a control page: {size} bytes", path=path)
            map_ = mmap.mmap(fd, size)
            lock_fd = os.dup(fd) if occupy else None
        finally:
            os.close(fd)
        if lock_fd is not None:
            fcntl.flock(lock_fd, fcntl.LOCK_SH)
        words = memoryview(map_).cast("Q")
        magic, ranks = words[MAGIC], words[RANKS]
        words.release()
        if magic != MAGIC_VALUE or cls.size_bytes(ranks) != size:
            raise DataError(f"{path} is not a control page", path=path)
        return cls(path, ranks, map_, lock_fd=lock_fd)

    @property
    def occupied(self) -> bool:
        """Whether a rank trains by this page, see :meth:`open`; for others than such ranks."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def block(self, local_rank: int) -> int:
        """Index of the first word of a rank's block."""
        if not 0 <= local_rank < self.ranks:
            raise IndexError(f"local rank {local_rank} of {self.ranks}")
        return HEAD_WORDS + local_rank * BLOCK_WORDS

    def close(self) -> None:
        """Unmap, and give the lock back."""
        self.words.release()
        self._map.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _membarrier(command: int) -> int:
    """Make the system call; returns 0, or the error's number (-1 where the call has no known number)."""
    number = _MEMBARRIER.get(platform.machine())
    if number is None:
        return -1
    libc = ctypes.CDLL(None, use_errno=True)
    return 0 if libc.syscall(number, command, 0, 0) == 0 else ctypes.get_errno()


def register_barriers() -> bool:
    """Have this process take part in expedited barriers; False where the kernel does not know them."""
    return _membarrier(_CMD_REGISTER_GLOBAL_EXPEDITED) == 0


def membarrier(*, expedited: bool = False) -> None:
    """Run a full memory barrier on every thread of every process of this host.

    Args:
        expedited: Only on those of processes that have called :func:`register_barriers` (and the caller), at once.

    Raises:
        ServiceError: The kernel does not do it.
    """
    code = _membarrier(_CMD_GLOBAL_EXPEDITED if expedited else _CMD_GLOBAL)
    if code:
        raise ServiceError(
            f"membarrier is not available on {platform.machine()}: {os.strerror(code) if code > 0 else 'no number'}",
            mend="use Linux 4.16 or newer, and let the container's seccomp profile allow membarrier",
        )
