"""Channels, the same suite over both ways of proving who is there."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resil.comm.auth import Auth, KeyAuth, MungeAuth
from slurm_resil.comm.channel import (
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    Server,
    connect,
    pair,
)
from slurm_resil.comm.munge import Munge, socket_path
from slurm_resil.core.errors import ConfigError, NotPermittedError, ServiceError

MUNGED = shutil.which("munged", path="/usr/sbin:/usr/bin")
ME = frozenset({os.getuid()})
NOBODY = 65534


def wait_for(what: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def munge_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if MUNGED is None:
        pytest.skip("munged is not installed")
    work = tmp_path_factory.mktemp("munge")
    (work / "key").write_bytes(os.urandom(1024))
    (work / "key").chmod(0o600)
    path = str(work / "socket")
    daemon = subprocess.Popen(
        [MUNGED, "--foreground", "--force", f"--key-file={work / 'key'}", f"--socket={path}"]
        + [f"--{name}-file={work / name}" for name in ("pid", "seed", "log")],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: os.path.exists(path))
        yield path
    finally:
        daemon.terminate()
        daemon.wait(10)


@pytest.fixture(params=["munge", "key"])
def auth(request: pytest.FixtureRequest, tmp_path: Path) -> Auth:
    if request.param == "munge":
        return MungeAuth(request.getfixturevalue("munge_socket"))
    return KeyAuth(str(tmp_path / "key")).create()


def echo(channel: Channel) -> None:
    while True:
        message = channel.recv(timeout_s=10)
        channel.send({**message, "uid": channel.peer_uid})


@pytest.fixture
def server(auth: Auth) -> Iterator[Server]:
    with Server("127.0.0.1", 0, echo, auth=auth) as made:
        yield made


def test_messages_go_both_ways_and_the_peer_is_known(server: Server, auth: Auth) -> None:
    channel = connect(server.address, auth=auth, server_uids=ME)
    for number in range(100):
        channel.send({"number": number, "text": "ä\n" * number})
        assert channel.recv(timeout_s=5) == {"number": number, "text": "ä\n" * number, "uid": os.getuid()}
    assert channel.peer_uid == os.getuid()
    channel.close()


def test_large_messages(server: Server, auth: Auth) -> None:
    channel = connect(server.address, auth=auth, server_uids=ME)
    text = "x" * (5 << 20)
    sender = threading.Thread(target=channel.send, args=({"text": text},))
    sender.start()
    assert channel.recv(timeout_s=20)["text"] == text
    sender.join()
    channel.close()


def test_a_quiet_peer_times_out_and_the_channel_stays_good(server: Server, auth: Auth) -> None:
    channel = connect(server.address, auth=auth, server_uids=ME)
    began = time.monotonic()
    with pytest.raises(ChannelTimeoutError):
        channel.recv(timeout_s=0.1)
    assert time.monotonic() - began < 2
    channel.send({"a": 1})
    assert channel.recv(timeout_s=5)["a"] == 1
    channel.close()


def test_the_client_refuses_a_server_of_another_user(server: Server, auth: Auth) -> None:
    with pytest.raises(NotPermittedError, match="uid"):
        connect(server.address, auth=auth, server_uids={NOBODY})


def test_the_server_refuses_users(auth: Auth) -> None:
    with Server("127.0.0.1", 0, echo, auth=auth, uids={NOBODY}) as made:
        with pytest.raises(NotPermittedError):
            connect(made.address, auth=auth, server_uids=ME)


def test_closing_wakes_a_receiver(server: Server, auth: Auth) -> None:
    channel = connect(server.address, auth=auth, server_uids=ME)
    woken: queue.Queue[BaseException] = queue.Queue()

    def receive() -> None:
        try:
            channel.recv(timeout_s=60)
        except ServiceError as error:
            woken.put(error)

    thread = threading.Thread(target=receive)
    thread.start()
    server.close()
    assert isinstance(woken.get(timeout=5), ChannelClosedError)
    thread.join()


class Tap:
    """A relay on the way that can change lines of the client: what is sent stays a TCP stream."""

    def __init__(self, target: str, change: Callable[[int, bytes], list[bytes]]) -> None:
        host, port = target.split(":")
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._there = socket.create_connection((host, int(port)))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._forth, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
        self._there.close()

    def _forth(self) -> None:
        client, _ = self._listener.accept()
        back = threading.Thread(target=self._back, args=(client,), daemon=True)
        self._threads.append(back)
        back.start()
        try:
            with client.makefile("rb") as lines:
                for number, line in enumerate(lines):
                    for changed in self._change(number, line):
                        self._there.sendall(changed)
            self._there.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def _back(self, client: socket.socket) -> None:
        with client:
            try:
                while data := self._there.recv(4096):
                    client.sendall(data)
                client.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


# line 0 of the client is its answer to the hello, line 1 its first message
@pytest.mark.parametrize(
    "change",
    [
        lambda number, line: [line.replace(b'"a":1', b'"a":2')] if number == 1 else [line],
        lambda number, line: [line, line] if number == 1 else [line],
        lambda number, line: [] if number == 1 else [line],
        lambda number, line: [b"0" * 32 + line[32:]] if number == 1 else [line],
        lambda number, line: [line[:-1] + b" \n"] if number == 1 else [line],
    ],
    ids=["changed", "replayed", "dropped", "other mac", "padded"],
)
def test_what_was_tampered_with_is_not_heard(auth: Auth, change: Callable[[int, bytes], list[bytes]]) -> None:
    heard: queue.Queue[Any] = queue.Queue()

    def handler(channel: Channel) -> None:
        try:
            while True:
                heard.put(channel.recv(timeout_s=5))
        except ChannelClosedError as error:
            heard.put(error)

    with Server("127.0.0.1", 0, handler, auth=auth) as made:
        with Tap(made.address, change) as tap:
            channel = connect(tap.address, auth=auth, server_uids=ME)
            channel.send({"a": 1})
            with contextlib.suppress(ChannelClosedError):
                channel.send({"b": 1})
            got = []
            while not got or not isinstance(got[-1], ChannelClosedError):
                got.append(heard.get(timeout=10))
            channel.close()
        assert {"a": 2} not in got
        assert {"b": 1} not in got
        assert got.count({"a": 1}) <= 1
        assert "does not verify" in str(got[-1])


def test_a_recorded_conversation_cannot_be_replayed(server: Server, auth: Auth) -> None:
    lines: list[bytes] = []

    def record(_: int, line: bytes) -> list[bytes]:
        lines.append(line)
        return [line]

    with Tap(server.address, record) as tap:
        channel = connect(tap.address, auth=auth, server_uids=ME)
        channel.send({"do": "it"})
        assert channel.recv(timeout_s=5)["do"] == "it"
        channel.close()
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as again:
        reader = again.makefile("rb")
        assert json.loads(reader.readline())["nonce"]
        again.sendall(b"".join(lines))
        assert reader.readline() == b""  # closed, without a word
        reader.close()


def test_a_stranger_who_says_nothing_or_nonsense_holds_nothing_up(server: Server, auth: Auth) -> None:
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port))), socket.create_connection((host, int(port))) as loud:
        loud.sendall(os.urandom(100) + b"\n")
        channel = connect(server.address, auth=auth, server_uids=ME)
        channel.send({"a": 1})
        assert channel.recv(timeout_s=5)["a"] == 1
        channel.close()


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ServiceError):
            connect(address, auth=KeyAuth("/nonexistent"), server_uids=ME, timeout_s=0.3)
        assert time.monotonic() - began < 3
    with pytest.raises(ServiceError, match="cannot connect"):
        connect(address, auth=KeyAuth("/nonexistent"), server_uids=ME, timeout_s=2)


def test_all_addresses_are_refused(auth: Auth) -> None:
    with pytest.raises(ConfigError, match="one is needed"):
        Server("0.0.0.0", 0, echo, auth=auth)


def test_a_peer_that_takes_nothing_is_given_up() -> None:
    here, there = pair()
    began = time.monotonic()
    with pytest.raises(ChannelClosedError, match="takes nothing"):
        for _ in range(1000):
            here.send({"text": "x" * 100_000}, timeout_s=0.2)
    assert time.monotonic() - began < 20
    there.close()


def test_a_pair_talks() -> None:
    here, there = pair()
    here.send({"a": 1})
    there.send({"b": 2})
    assert there.recv(timeout_s=1) == {"a": 1}
    assert here.recv(timeout_s=1) == {"b": 2}
    here.close()
    with pytest.raises(ChannelClosedError):
        there.recv(timeout_s=1)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = KeyAuth(str(tmp_path / "key")).create()
    with Server("127.0.0.1", 0, echo, auth=key) as made:
        (tmp_path / "key").chmod(0o640)
        with pytest.raises(NotPermittedError, match="can be read by others"):
            connect(made.address, auth=key, server_uids=ME)


def test_another_key_is_refused(tmp_path: Path) -> None:
    key, other = KeyAuth(str(tmp_path / "key")).create(), KeyAuth(str(tmp_path / "other")).create()
    with Server("127.0.0.1", 0, echo, auth=key) as made:
        with pytest.raises(NotPermittedError):
            connect(made.address, auth=other, server_uids=ME)


def test_a_credential_is_good_once_and_for_one_user_only(munge_socket: str) -> None:
    munge = Munge(munge_socket)
    credential = munge.encode(b"payload \0 bytes", uid=os.getuid())
    opened = munge.decode(credential)
    assert (opened.payload, opened.uid) == (b"payload \0 bytes", os.getuid())
    with pytest.raises(NotPermittedError, match=r"[Rr]eplay"):
        munge.decode(credential)
    with pytest.raises(NotPermittedError, match=r"[Uu]nauthorized"):
        munge.decode(munge.encode(b"", uid=NOBODY))
    with pytest.raises(NotPermittedError):
        munge.decode("MUNGE:nonsense:")
    with pytest.raises(NotPermittedError):
        munge.decode("ä")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_the_uid_is_that_of_the_process(munge_socket: str) -> None:
    program = "import sys; from slurm_resil.comm.munge import Munge; print(Munge(sys.argv[1]).encode(b'x'))"
    os.chmod(munge_socket, 0o777)
    for parent in Path(munge_socket).parents:
        if str(parent) == "/tmp":
            break
        parent.chmod(0o755)
    made = subprocess.run(
        [sys.executable, "-c", program, munge_socket], user=NOBODY, capture_output=True, text=True, timeout=30
    )
    if made.returncode:
        pytest.skip(f"another user cannot run this interpreter: {made.stderr.strip()[-200:]}")
    assert Munge(munge_socket).decode(made.stdout.strip()).uid == NOBODY


def test_no_munged_is_a_service_that_does_not_answer(tmp_path: Path) -> None:
    if MUNGED is None:
        pytest.skip("munge is not installed")
    with pytest.raises(ServiceError, match="munged"):
        Munge(str(tmp_path / "nothing")).encode(b"")


def test_the_socket_comes_from_the_environment_or_from_slurm(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\n  authinfo=cred_expire=5,socket=/run/a.socket\n")
    assert socket_path({"SLURM_CONF": str(conf)}) == "/run/a.socket"
    assert socket_path({"SLURM_CONF": str(conf), "MUNGE_SOCKET": "/run/b"}) == "/run/b"
    conf.write_text("#AuthInfo=socket=/run/a.socket\n")
    assert socket_path({"SLURM_CONF": str(conf)}) is None
    assert socket_path({"SLURM_CONF": str(tmp_path / "none")}) is None


def test_one_host_cannot_keep_the_others_out(auth: Auth) -> None:
    with Server("127.0.0.1", 0, echo, auth=auth, limit_per_host=3) as server:
        host, port = server.address.split(":")
        held = [socket.create_connection((host, int(port)), timeout=10) for _ in range(3)]
        try:
            for sock in held:
                assert sock.recv(1) == b"{"  # greeted
            with pytest.raises(ServiceError):
                connect(server.address, auth=auth, server_uids=ME)
            other = socket.create_connection((host, int(port)), timeout=10, source_address=("127.0.0.2", 0))
            held.append(other)
            assert other.recv(1) == b"{"
        finally:
            for sock in held:
                sock.close()
        wait_for(lambda: not server._open)
        with connect_closing(server, auth) as channel:
            channel.send({"a": 1})
            assert channel.recv(timeout_s=10)["a"] == 1


def test_a_server_takes_no_longer_messages_than_it_says(auth: Auth) -> None:
    with Server("127.0.0.1", 0, echo, auth=auth, max_bytes=1000) as server, connect_closing(server, auth) as channel:
        channel.send({"a": "x" * 900})
        assert len(channel.recv(timeout_s=10)["a"]) == 900
        with pytest.raises(ChannelClosedError):
            channel.send({"a": "x" * 100_000})
            channel.recv(timeout_s=10)


@contextlib.contextmanager
def connect_closing(server: Server, auth: Auth) -> Iterator[Channel]:
    channel = connect(server.address, auth=auth, server_uids=ME)
    try:
        yield channel
    finally:
        channel.close()
