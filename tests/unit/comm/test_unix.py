from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_resil.comm.channel import Channel, ChannelClosedError
from slurm_resil.comm.unix import UnixServer, connect
from slurm_resil.core.errors import ServiceError


def echo(channel: Channel) -> None:
    try:
        while True:
            channel.send({"again": channel.recv(timeout_s=10)})
    except ChannelClosedError:
        pass


@pytest.fixture
def path(tmp_path: Path) -> Callable[[int], str]:
    def make(length: int) -> str:
        directory = tmp_path / ("x" * length)
        directory.mkdir(exist_ok=True)
        return str(directory / "agent.sock")

    return make


@pytest.mark.parametrize("length", [1, 200])
def test_a_socket_works_however_long_its_path_is(path: Callable[[int], str], length: int) -> None:
    server = UnixServer(path(length), echo)
    channel = connect(path(length))
    channel.send({"a": "ä"})
    assert channel.recv(timeout_s=5) == {"again": {"a": "ä"}}
    assert channel.peer_uid == os.getuid()
    assert os.stat(path(length)).st_mode & 0o777 == 0o600
    channel.close()
    server.close()
    assert not os.path.exists(path(length))


def test_a_socket_of_a_dead_agent_is_replaced_and_that_of_a_successor_kept(path: Callable[[int], str]) -> None:
    old = UnixServer(path(1), echo)
    new = UnixServer(path(1), echo)
    old.close()
    channel = connect(path(1))
    channel.close()
    new.close()
    with pytest.raises(ServiceError, match="nobody answers"):
        connect(path(1))


def test_a_directory_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="cannot listen"):
        UnixServer(str(tmp_path / "none" / "agent.sock"), echo)
