r"""Messages between hosts: JSON lines over TCP, authenticated once per connection, then a MAC on every message.

Handshake, one line each way, then everything under the session key::

    server   {"hello": "slurm_resil channel 1", "auth": "munge", "uid": 1000, "nonce": "..."}
    client   {"auth": "munge", "credential": "MUNGE:..."}
    server   <mac> {"ok": true}

A message is ``<mac> <json>\n``. The MAC covers the direction and a sequence number, so that a message can neither be
replayed, reordered nor reflected. Nothing is encrypted: secrets do not belong into messages. Every call has a time
limit, and a peer that is gone without a word is noticed by TCP (``TCP_USER_TIMEOUT``, keep-alive).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from slurm_resil.comm.auth import KEY_BYTES, PURPOSE, Auth
from slurm_resil.core import units
from slurm_resil.core.errors import ConfigError, NotPermittedError, ResilError, ServiceError, UsageError
from slurm_resil.core.log import event

MAX_BYTES = 16 << 20  # of a message
_HELLO_BYTES = 64 << 10  # of a handshake line: the peer is not known yet
_MAC_CHARS = 32
HANDSHAKE_S = 5.0
SILENT_PEER_MS = 10_000
_OWN_ADDRESS = "name one address of this host, as `ip -brief address` shows them"
log = logging.getLogger(__name__)


class ChannelClosedError(ServiceError):
    """The peer is gone, or what it sent does not verify."""


class ChannelTimeoutError(ServiceError):
    """Nothing came in time; the channel is as good as before."""


class Channel:
    """One authenticated connection. One thread may receive while others send.

    Attributes:
        peer: ``host:port`` of the other end, for logs.
        peer_uid: User id that the other end has proven.
    """

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        *,
        server: bool,
        peer_uid: int,
        peer: str = "local",
        max_bytes: int = MAX_BYTES,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._key = key
        self._out, self._in = (b"s", b"c") if server else (b"c", b"s")
        self._sent = self._received = 0
        self._buffer = bytearray()
        self._searched = 0
        self._lock = threading.Lock()
        self.closed = False
        self.peer, self.peer_uid = peer, peer_uid
        self._max_bytes = max_bytes

    def fileno(self) -> int:
        """Descriptor, to poll for a message (an already buffered one is not seen; use :meth:`recv` with 0 first)."""
        return self._sock.fileno()

    def send(self, message: Mapping[str, Any], *, timeout_s: float = 5.0) -> None:
        """Send one message.

        Raises:
            ChannelClosedError: The peer is gone or takes nothing; the channel is closed then.
        """
        data = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        if len(data) > MAX_BYTES:  # the most that any peer accepts
            raise ServiceError(f"a message of {len(data)} bytes is over the limit of {MAX_BYTES}", peer=self.peer)
        with self._lock:
            line = self._mac(self._out, self._sent, data) + b" " + data + b"\n"
            self._sent += 1
            self._send_all(line, timeout_s)

    def recv(self, *, timeout_s: float) -> dict[str, Any]:
        """Receive one message.

        Raises:
            ChannelTimeoutError: Nothing came.
            ChannelClosedError: The peer is gone, or the message does not verify.
        """
        line = self._line(timeout_s, self._max_bytes + _MAC_CHARS + 1)
        mac, _, data = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(self._in, self._received, data)):
            self.close()
            raise ChannelClosedError(f"{self.peer} sent a message that does not verify", peer=self.peer)
        self._received += 1
        message = json.loads(data)
        if not isinstance(message, dict):
            self.close()
            raise ChannelClosedError(f"{self.peer} sent a message that is no object", peer=self.peer)
        return message

    def close(self) -> None:
        """Close; a thread in :meth:`recv` is woken."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()

    def _mac(self, direction: bytes, number: int, data: bytes) -> bytes:
        digest = hmac.digest(self._key, direction + number.to_bytes(8, "big") + data, "sha256")
        return digest.hex()[:_MAC_CHARS].encode()

    def _gone(self, why: str) -> ChannelClosedError:
        self.close()
        return ChannelClosedError(f"connection to {self.peer}: {why}", peer=self.peer)

    def _wait(self, what: int, deadline: float) -> bool:
        poll = select.poll()
        try:
            poll.register(self._sock, what)
        except ValueError:
            raise self._gone("closed") from None
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def _send_all(self, line: bytes, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        view = memoryview(line)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline):
                    # a part may have gone out: the stream cannot be used any more
                    raise self._gone(f"takes nothing for {timeout_s} s") from None
            except OSError as error:
                raise self._gone(str(error)) from error

    def _line(self, timeout_s: float, limit: int) -> bytes:
        deadline = time.monotonic() + timeout_s
        while True:
            end = self._buffer.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                self._searched = 0
                return line
            self._searched = len(self._buffer)
            if len(self._buffer) > limit:
                raise self._gone(f"sent a line of more than {limit} bytes")
            try:
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                if not self._wait(select.POLLIN, deadline):
                    raise ChannelTimeoutError(f"nothing from {self.peer} in {timeout_s} s", peer=self.peer) from None
                continue
            except OSError as error:
                raise self._gone(str(error)) from error
            if not data:
                raise self._gone("closed by the other end")
            self._buffer += data

    # the handshake

    def _plain(self, message: Mapping[str, Any]) -> None:
        self._send_all(json.dumps(message).encode() + b"\n", HANDSHAKE_S)

    def _greeting(self, timeout_s: float) -> dict[str, Any]:
        try:
            message = json.loads(self._line(timeout_s, _HELLO_BYTES))
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise self._gone("does not speak this protocol")
        return message


def pair() -> tuple[Channel, Channel]:
    """Connect two ends inside this process: (server's end, client's end)."""
    here, there = socket.socketpair()
    key, uid = secrets.token_bytes(KEY_BYTES), os.getuid()
    return Channel(here, key, server=True, peer_uid=uid), Channel(there, key, server=False, peer_uid=uid)


def connect(address: str, *, auth: Auth, server_uids: Collection[int], timeout_s: float = 10.0) -> Channel:
    """Connect to a server and prove who we are.

    Args:
        address: ``host:port``.
        auth: The way to prove it; must be the server's.
        server_uids: Users that the server may be; it is made to prove that.
        timeout_s: For everything together, seconds.

    Raises:
        ServiceError: No answer, or not in time.
        NotPermittedError: One side does not accept the other.
    """
    deadline = time.monotonic() + timeout_s
    try:
        sock = socket.create_connection(units.host_port(address), timeout=timeout_s)
    except UsageError as error:
        raise ServiceError(error.message, mend=error.mend) from error
    except OSError as error:
        raise ServiceError(f"cannot connect to {address}: {error}", address=address) from error
    _tune(sock)
    channel = Channel(sock, b"", server=False, peer_uid=-1, peer=address)
    try:
        hello = channel._greeting(deadline - time.monotonic())
        if hello.get("hello") != PURPOSE or hello.get("auth") != auth.name:
            spoken = f"{hello.get('hello')!r} with {hello.get('auth')!r}"
            raise ServiceError(f"{address} speaks {spoken}, expected {PURPOSE!r} with {auth.name!r}")
        reply, channel._key = auth.answer(hello, server_uids)
        channel._plain({"auth": auth.name, **reply})
        try:
            welcome = channel.recv(timeout_s=deadline - time.monotonic())
        except ChannelClosedError as error:
            raise NotPermittedError(f"{address} did not accept uid {os.getuid()}", address=address) from error
        if welcome != {"ok": True}:
            raise ServiceError(f"{address} answered {welcome!r}", address=address)
        channel.peer_uid = int(hello["uid"])
        return channel
    except BaseException:
        channel.close()
        raise


def _not_listening(host: str, port: int, error: OSError) -> ResilError:
    """Our error for an address that cannot be listened on."""
    if error.errno is not None and error.errno < 0:  # of the name service; the socket module makes an OSError of it
        return ConfigError(f"cannot listen on {host}:{port}: nobody knows the name {host}", mend=_OWN_ADDRESS)
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"cannot listen on {host}:{port}: that is no address of this host", mend=_OWN_ADDRESS)
    if error.errno == errno.EADDRINUSE:
        mend = f"`ss -ltnp sport = :{port}` shows who has it: end that process, or take another port"
        return ServiceError(f"cannot listen on {host}:{port}: another process does", mend=mend)
    if error.errno == errno.EACCES:
        mend = "take a port from 1024 on, or be root"
        return NotPermittedError(f"cannot listen on {host}:{port}: {os.strerror(error.errno)}", mend=mend)
    return ServiceError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}")


class Server:
    """Accept connections; each gets a thread that runs the handshake and then ``handler``.

    Args:
        host: Address to bind to: this node's own one, or loopback. Never all of them.
        port: Port, 0 for any.
        handler: Called with each authenticated channel, in the connection's own thread; the channel is closed when it
            returns. It looks at ``channel.peer_uid`` to decide what the peer may ask.
        auth: How peers prove who they are.
        uids: Users that may connect, None for everybody whose identity is proven.
        limit: Connections at a time; more are refused.
        limit_per_host: The same for each address that they come from: one host must not keep the others out.
        max_bytes: Size of a message that is accepted.

    Attributes:
        address: ``host:port`` that it listens on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        handler: Callable[[Channel], None],
        *,
        auth: Auth,
        uids: Collection[int] | None = None,
        limit: int = 16_384,
        limit_per_host: int | None = None,
        max_bytes: int = MAX_BYTES,
        name: str = "channel",
    ) -> None:
        if host in ("", "0.0.0.0", "::"):  # noqa: S104 - refused here
            raise ConfigError(f"{host!r} is every address of this host: one is needed", mend=_OWN_ADDRESS)
        self._handler, self._auth, self._uids, self._name = handler, auth, uids, name
        self._limit, self._limit_per_host, self._max_bytes = limit, limit_per_host or limit, max_bytes
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=4096)
        except OSError as error:
            raise _not_listening(host, port, error) from error
        bound = self._listener.getsockname()
        self.address = f"[{bound[0]}]:{bound[1]}" if family == socket.AF_INET6 else f"{bound[0]}:{bound[1]}"
        self._open: dict[Channel, str] = {}  # and the address that it comes from
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            channels = list(self._open)
        for channel in channels:
            channel.close()
        self._thread.join(timeout=5)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._closing.is_set():
                    return
                self._closing.wait(0.05)  # out of descriptors: others will close some
                continue
            with self._lock:
                same = sum(host == peer[0] for host in self._open.values()) if self._limit_per_host < self._limit else 0
                full = len(self._open) >= self._limit or same >= self._limit_per_host
            if full:
                event(log, "connection_refused", level=logging.WARNING, peer=peer[0], same_host=same)
                sock.close()
                continue
            _tune(sock)
            name = f"{peer[0]}:{peer[1]}"
            channel = Channel(sock, b"", server=True, peer_uid=-1, peer=name, max_bytes=self._max_bytes)
            with self._lock:
                self._open[channel] = peer[0]
            thread = threading.Thread(target=self._serve, args=(channel,), name=f"{self._name} {peer[0]}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: there may be again
                event(log, "connection_refused", level=logging.ERROR, peer=peer[0], why=str(error))
                channel.close()
                with self._lock:
                    self._open.pop(channel, None)
                self._closing.wait(0.05)

    def _serve(self, channel: Channel) -> None:
        try:
            self._greet(channel)
            self._handler(channel)
        except ChannelClosedError:
            pass  # the handler's own business, if it cares
        except ResilError as error:
            event(log, "connection_failed", level=logging.WARNING, peer=channel.peer, why=str(error))
        except Exception:  # top of a thread
            log.exception("connection_crashed", extra={"fields": {"peer": channel.peer}})
        finally:
            channel.close()
            with self._lock:
                self._open.pop(channel, None)

    def _greet(self, channel: Channel) -> None:
        nonce = secrets.token_hex(KEY_BYTES)
        channel._plain({"hello": PURPOSE, "auth": self._auth.name, "uid": os.getuid(), "nonce": nonce})
        reply = channel._greeting(HANDSHAKE_S)
        if reply.get("auth") != self._auth.name:
            raise NotPermittedError(f"{channel.peer} wants to use {reply.get('auth')!r}", peer=channel.peer)
        channel._key, channel.peer_uid = self._auth.check(nonce, reply)
        if self._uids is not None and channel.peer_uid not in self._uids:
            raise NotPermittedError(f"uid {channel.peer_uid} may not connect", peer=channel.peer)
        channel.send({"ok": True})


def serve(
    host: str, port: int, handler: Callable[[Channel], None], *, auth: Auth, uids: Collection[int] | None = None
) -> Server:
    """Start a :class:`Server`."""
    return Server(host, port, handler, auth=auth, uids=uids)


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_PEER_MS)
