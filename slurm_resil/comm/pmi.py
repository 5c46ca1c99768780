"""Between MPICH and Slurm's PMI: keeps what MPICH sends within what Slurm can read.

Slurm's plugin ``pmi2`` offers values of 1024 bytes in version 1 of the protocol, and reads requests of at most 1023
bytes, with the names of command, space and key in them. MPICH cuts the address of a rank into values as long as it was
offered: UCX's addresses come in a buffer of 4 KiB whose rest is whatever was in memory before, and where that is not
zeros, requests are too long. Slurm then takes the start for the whole and the rest for a bad request: ranks connect to
addresses that never were, or wait for ever. So a relay passes all on as it is, but offers shorter values.

It is a process of its own, since MPI starts with the interpreter held: ``python -I -S pmi.py``, with Slurm as standard
input and MPI as standard output. It ends when either of them does.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import sys
from collections.abc import MutableMapping

VALUE_BYTES = 900  # beside it there is room for the longest names: 1023 - 900 - `cmd=put kvsname= key= value=`
_MOST_BYTES = 1 << 16
_OFFER = re.compile(rb"(?<=\bvallen_max=)\d+")
_OUTLIVES = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}  # the end of MPI needs it


def shorten(env: MutableMapping[str, str]) -> None:
    """Put a relay between this process and the PMI of Slurm, before MPI starts; with another launcher do nothing.

    Args:
        env: Environment of this process; ``PMI_FD`` in it is changed. It must be what MPI sees.
    """
    if "SLURM_STEP_ID" not in env or not env.get("PMI_FD", "").isdecimal():
        return
    slurm = int(env["PMI_FD"])
    ours, theirs = socket.socketpair()
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__],
        dict(env),
        file_actions=[(os.POSIX_SPAWN_DUP2, slurm, 0), (os.POSIX_SPAWN_DUP2, theirs.fileno(), 1)],
        setsigmask=_OUTLIVES,
    )
    theirs.close()
    os.close(slurm)
    env["PMI_FD"] = str(ours.detach())


def relay(slurm: int, mpi: int) -> None:
    """Pass on what comes at either descriptor until one has come to its end."""
    other = {slurm: mpi, mpi: slurm}
    while True:
        for ready in select.select(list(other), [], [])[0]:
            data = os.read(ready, _MOST_BYTES)
            if not data:
                return
            if ready == slurm and data.startswith(b"cmd=maxes"):
                data = _OFFER.sub(lambda offer: b"%d" % min(int(offer[0]), VALUE_BYTES), data)
            while data:
                data = data[os.write(other[ready], data) :]


if __name__ == "__main__":
    try:
        relay(0, 1)
    except OSError:  # one of them is dead, and the other one hears of it by our end
        sys.exit(1)
