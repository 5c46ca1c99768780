"""What benchmarks with movers share: MPI's launcher, and a look at the movers' memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator

from slurm_resil.core.errors import ConfigError

_EVERY_S = 0.02


def mpiexec() -> str:
    """Launcher of the MPI beside this interpreter, else from the path.

    Raises:
        ConfigError: There is none.
    """
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    found = beside if os.path.exists(beside) else shutil.which("mpiexec")
    if found is None:
        raise ConfigError("mpiexec is not found", mend="install the extra `mpi`")
    return found


class PeakMemory:
    """Looks at running movers, a few times in a blink.

    Attributes:
        most: The most memory that one of them had that is no file's, bytes.
    """

    def __init__(self) -> None:
        self.most = 0

    @contextlib.contextmanager
    def of(self, word: str) -> Iterator[None]:
        """Look at movers that have a word in their command line while the block runs."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(word.encode(), over), name="memory")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, word: bytes, over: threading.Event) -> None:
        found: list[str] = []
        rounds = 0
        while not over.wait(_EVERY_S):
            if rounds % 16 == 0:
                found = [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_mover(pid, word)]
            rounds += 1
            self.most = max([self.most, *(_anonymous(pid) for pid in found)])


def _is_mover(pid: str, word: bytes) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().split(b"\0")
        return words[1:3] == [b"-m", b"slurm_resil"] and b"mover" in words and word in words
    return False


def _anonymous(pid: str) -> int:
    """Memory of a process that is no file's, bytes; 0 if it has ended."""
    with contextlib.suppress(OSError, KeyError, ValueError), open(f"/proc/{pid}/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
        return int(fields["RssAnon"].split()[0]) << 10
    return 0
