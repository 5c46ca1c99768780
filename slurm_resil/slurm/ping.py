"""Whether a node is there: a source of its own beside what slurmctld believes, which may be 30 s old."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time

from slurm_resil.core.errors import ServiceError

TIMEOUT_S = 2.0
AGAIN_S = 0.5
CLOSED_PORT = 1  # nobody listens there: a host that is there says so
ACCEPTS, REFUSES, SILENT = "accepts", "refuses", "silent"
# what the network says of the peer; everything else is this host's own trouble, and says nothing of the peer
_GONE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNABORTED)


def knock(address: str, port: int) -> str:
    """Try to connect once: ``accepts``, ``refuses``, or ``silent`` in time.

    Raises:
        ServiceError: This host cannot even try (no name service, no descriptors...): nothing may be concluded.
    """
    try:
        with socket.create_connection((address, port), timeout=TIMEOUT_S):
            return ACCEPTS
    except ConnectionRefusedError:
        return REFUSES
    except TimeoutError:
        return SILENT
    except OSError as error:
        if error.errno in _GONE:
            return SILENT
        raise ServiceError(f"cannot look whether {address}:{port} answers: {error}") from error


def _knock_twice(address: str, port: int) -> str:
    """See :func:`knock`; a refusal is tried once more, as a daemon may be restarting."""
    found = knock(address, port)
    if found != REFUSES:
        return found
    time.sleep(AGAIN_S)
    return knock(address, port)


def reachable(address: str, port: int) -> bool:
    """Whether something accepts connections there.

    Raises:
        ServiceError: See :func:`knock`.
    """
    return _knock_twice(address, port) == ACCEPTS


def gone(address: str, port: int) -> bool:
    """Whether a node's daemon is gone for certain: it refuses, or the whole host is silent.

    A full queue of connections, which any user can make, looks like silence: a host that refuses another port or
    answers an echo request is there.

    Raises:
        ServiceError: See :func:`knock`.
    """
    found = _knock_twice(address, port)
    if found != SILENT:
        return found == REFUSES
    return knock(address, CLOSED_PORT) == SILENT and not _echoes(address)


def _echoes(address: str) -> bool:
    """Whether the host answers an ICMP echo request; False too where this user may not send one."""
    try:
        host = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        try:
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
        except PermissionError:
            sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    except OSError:
        return False
    with sock:
        sock.settimeout(TIMEOUT_S)
        number = os.getpid() & 0xFFFF
        try:
            for sequence in (1, 2):
                sock.sendto(_echo_request(number, sequence), (host, 0))
            end = time.monotonic() + TIMEOUT_S
            while time.monotonic() < end:
                data, peer = sock.recvfrom(1024)
                offset = (data[0] & 15) * 4 if data and data[0] >> 4 == 4 else 0  # raw sockets show the IP header
                if peer[0] == host and data[offset : offset + 1] == b"\0":
                    return True
        except OSError:
            return False
    return False


def _echo_request(number: int, sequence: int) -> bytes:
    head = struct.pack("!BBHHH", 8, 0, 0, number, sequence)
    total = sum(struct.unpack("!4H", head))
    total = (total >> 16) + (total & 0xFFFF)
    return struct.pack("!BBHHH", 8, 0, ~total & 0xFFFF, number, sequence)
