"""What is taken for a node that is gone, and what is not; with real sockets on this host."""

from __future__ import annotations

import errno
import socket

import pytest

from slurm_resil.core.errors import ServiceError
from slurm_resil.slurm import ping


@pytest.fixture
def listener() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as made:
        yield made


def test_who_accepts_is_there_and_who_refuses_is_gone(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert ping.reachable("127.0.0.1", port)
    assert not ping.gone("127.0.0.1", port)
    listener.close()
    assert not ping.reachable("127.0.0.1", port)
    assert ping.gone("127.0.0.1", port)


def test_a_full_queue_that_a_user_has_made_is_no_dead_node(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ping, "TIMEOUT_S", 0.5)
    port = listener.getsockname()[1]
    held = []
    try:
        for _ in range(20):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            held.append(one)
        assert ping.knock("127.0.0.1", port) == ping.SILENT
        assert not ping.gone("127.0.0.1", port)
    finally:
        for one in held:
            one.close()


def test_trouble_of_this_host_says_nothing_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceError):
        ping.gone("node1.invalid", 6818)

    def none_left(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "create_connection", none_left)
    with pytest.raises(ServiceError, match="Too many open files"):
        ping.reachable("127.0.0.1", 6818)
