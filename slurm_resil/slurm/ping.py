"""Whether a node's slurmd answers: a source of its own beside what slurmctld believes, which may be 30 s old."""

from __future__ import annotations

import socket
import time

TIMEOUT_S = 2.0
AGAIN_S = 0.5


def reachable(address: str, port: int) -> bool:
    """Whether something accepts connections there; a refusal is tried once more, as a daemon may be restarting."""
    for again in (True, False):
        try:
            with socket.create_connection((address, port), timeout=TIMEOUT_S):
                return True
        except ConnectionRefusedError:
            if again:
                time.sleep(AGAIN_S)
        except OSError:
            return False
    return False
