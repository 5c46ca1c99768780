from __future__ import annotations

import queue
from pathlib import Path

from slurm_resil.agent import protocol as p
from slurm_resil.agent.link import RankLink
from slurm_resil.comm.channel import Channel, ChannelClosedError
from slurm_resil.comm.unix import UnixServer

HELLO = p.RankHello(rank=0, local_rank=0, world_size=1, run_id="r", attempt=0, cycle=0, pid=1)


class Agent:
    """Answers a rank, and keeps what it says."""

    def __init__(self, path: str) -> None:
        self.heard: queue.SimpleQueue[p.Message] = queue.SimpleQueue()
        self._channels: list[Channel] = []
        self._server = UnixServer(path, self._serve)

    def _serve(self, channel: Channel) -> None:
        self._channels.append(channel)
        assert isinstance(p.from_wire(channel.recv(timeout_s=10)), p.RankHello)
        channel.send(p.to_wire(p.Page(path="page", slots=2)))
        try:
            while True:
                self.heard.put(p.from_wire(channel.recv(timeout_s=10)))
        except ChannelClosedError:
            pass

    def close(self) -> None:
        self._server.close()
        for channel in self._channels:
            channel.close()


def test_a_save_that_did_not_work_without_an_agent_is_told_to_the_next_one(tmp_path: Path) -> None:
    path = str(tmp_path / "agent")
    agent = Agent(path)
    link = RankLink(path, HELLO, timeout_s=10)
    agent.close()
    while link._channel is not None:
        link._closing.wait(0.01)
    link.give_up(3, "for the test")
    agent = Agent(path)
    try:
        assert agent.heard.get(timeout=10) == p.GiveUp(iteration=3, reason="for the test")
    finally:
        link.close()
        agent.close()
