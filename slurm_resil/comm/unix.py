"""The same channels on a Unix socket: between processes of one host, where the kernel says who the peer is."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from slurm_resil.comm.channel import Channel
from slurm_resil.core.errors import NotPermittedError, ServiceError

_KEY = b"unix socket"  # no secret: the kernel vouches for both ends, the MAC is a checksum here
_PATH_LIMIT = 107


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """A name for a socket that fits into a socket address, however long its path is."""
    if len(os.fsencode(path)) <= _PATH_LIMIT:
        yield path
        return
    parent, name = os.path.split(path)
    fd = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def _peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid), int(uid)


def connect(path: str, *, timeout_s: float = 5.0) -> Channel:
    """Connect to a server of this user.

    Raises:
        ServiceError: Nobody listens.
        NotPermittedError: The server is another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        with _short(path) as name:
            sock.connect(name)
        _, uid = _peer(sock)
        if uid != os.getuid():
            raise NotPermittedError(f"{path} belongs to uid {uid}", path=path)
    except OSError as error:
        sock.close()
        raise ServiceError(f"nobody answers at {path}: {error}", path=path) from error
    except BaseException:
        sock.close()
        raise
    return Channel(sock, _KEY, server=False, peer_uid=uid, peer=path)


class UnixServer:
    """Accept connections of this user; each gets a thread that runs ``handler`` with its channel.

    Args:
        path: Socket; an old one is replaced, its directory must exist.
        handler: Called in the connection's thread; the channel is closed when it returns.

    Raises:
        ServiceError: The socket cannot be made.
    """

    def __init__(self, path: str, handler: Callable[[Channel], None]) -> None:
        self._path, self._handler = path, handler
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        temp = os.path.join(os.path.dirname(path), f".{os.getpid()}.sock")
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temp)
            with _short(temp) as name:
                self._listener.bind(name)
            os.chmod(temp, 0o600)
            self._listener.listen(512)
            os.replace(temp, path)  # whoever finds the name can connect
        except OSError as error:
            self._listener.close()
            raise ServiceError(f"cannot listen at {path}: {error}", path=path) from error
        self._inode = os.stat(path).st_ino
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()

    def close(self) -> None:
        """Stop listening; connections stay."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:  # not that of a successor
                os.unlink(self._path)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            pid, uid = _peer(sock)
            if uid not in (os.getuid(), 0):
                sock.close()
                continue
            channel = Channel(sock, _KEY, server=True, peer_uid=uid, peer=f"pid {pid}")
            threading.Thread(target=self._serve, args=(channel,), name=f"rank pid {pid}", daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        try:
            self._handler(channel)
        finally:
            channel.close()
