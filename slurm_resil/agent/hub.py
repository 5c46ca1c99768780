"""The leader's connections and its one thread: who is there, who is silent, and everything in one order."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slurm_resil.agent import protocol as p
from slurm_resil.agent.agreement import Progress
from slurm_resil.comm.auth import Auth
from slurm_resil.comm.channel import Channel, ChannelClosedError, ChannelTimeoutError, Server, pair
from slurm_resil.core.errors import DataError
from slurm_resil.core.log import event
from slurm_resil.core.model import RunInfo

SILENCE_S = 5.0  # an agent that says nothing for this long is lost
RECONNECT_S = 2.0  # so is one whose connection broke and did not come back
JOIN_S = 120.0  # and one that never came
SEND_S = 1.0
TICK_S = 0.02
HICCUP_S = 2.0  # when this thread itself did not run for so long, nobody else is to blame
log = logging.getLogger(__name__)


@dataclass
class Node:
    """One node, as the leader knows it.

    Attributes:
        name: Its name; empty until the first agent of this place came.
        channel: Connection, None while there is none.
        pid: Process of its agent, 0 before the first.
        progress: Where its ranks are.
        heard: When it was last heard.
        broken: When the connection broke (or when waiting for the first one may end); None if it does not matter.
        lost: Whether it was reported as lost.
    """

    name: str
    channel: Channel | None = None
    pid: int = 0
    progress: Progress = field(default_factory=Progress)
    heard: float = 0.0
    broken: float | None = None
    lost: bool = False

    def report(self, newest: int, rate: float | None, now: float) -> None:
        """Hear where the ranks are; without a measured rate it is taken from the last report."""
        before = self.progress
        if rate is None:
            span = now - before.at
            fresh = (newest - before.newest) / span if before.newest and span > 0.005 else 0.0
            rate = max(before.rate / 2, fresh) if fresh else before.rate
        self.progress = Progress(newest=newest, rate=rate, at=now)


class Hub:
    """See the module.

    Args:
        names: Names of the nodes, by node_rank.
        hear: Called with each message of a connection.
        gone: Called when a connection is gone.
        turn: Called after each message and at least every ``TICK_S`` seconds, with the time.

    All are called in the hub's thread.

    Attributes:
        nodes: The nodes, by node_rank.
        address: ``host:port``, empty before :meth:`listen`.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        hear: Callable[[Channel, p.Message], None],
        gone: Callable[[Channel], None],
        turn: Callable[[float], None],
    ) -> None:
        now = time.monotonic()
        self.nodes = [Node(name=name, broken=now + JOIN_S - RECONNECT_S) for name in names]
        self.address = ""
        self._hear, self._gone, self._turn = hear, gone, turn
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._checked = now
        self._server: Server | None = None
        self._thread = threading.Thread(target=self._run, name="leader", daemon=True)

    def listen(self, host: str, auth: Auth) -> None:
        """Accept agents and clients of this user."""
        self._server = Server(host, 0, self._serve, auth=auth, uids={os.getuid()}, name="leader")
        self.address = self._server.address

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def attach(self) -> Channel:
        """Connect an agent of this same process; returns its end."""
        here, there = pair()
        threading.Thread(target=self._serve, args=(here,), name="leader local", daemon=True).start()
        return there

    def put(self, call: Callable[[], None]) -> None:
        """Have something done in the hub's thread."""
        self._inbox.put(call)

    def place(self, channel: Channel) -> int | None:
        """Node of a connection."""
        return next((place for place, node in enumerate(self.nodes) if node.channel is channel), None)

    def send(self, channel: Channel, message: p.Message) -> None:
        """Send; a connection that does not take it is closed, and reported as gone."""
        with contextlib.suppress(ChannelClosedError):
            channel.send(p.to_wire(message), timeout_s=SEND_S)

    def tell_all(self, message: p.Message) -> None:
        """Send to all agents that are there."""
        for node in self.nodes:
            if node.channel is not None:
                self.send(node.channel, message)

    @property
    def connected(self) -> int:
        """Number of agents that are there."""
        return sum(node.channel is not None for node in self.nodes)

    def check(self, now: float) -> list[tuple[Node, str]]:
        """Find nodes that are newly lost, and why; call it at every turn."""
        late, self._checked = now - self._checked > HICCUP_S, now
        found = []
        for node in self.nodes:
            if late:
                node.heard = now
            if node.channel is not None and now > node.heard + SILENCE_S:
                channel = node.channel
                channel.close()
                self._gone(channel)
                found.append((node, f"silent for {SILENCE_S:g} s"))
            elif node.channel is None and node.broken is not None and now > node.broken + RECONNECT_S:
                found.append((node, "its connection broke" if node.pid else f"its agent has not come in {JOIN_S:g} s"))
        for node, _ in found:
            node.broken = None
        found = [(node, why) for node, why in found if not node.lost]
        for node, _ in found:
            node.lost = True
        return found

    def unwanted(self, hello: p.Hello, info: RunInfo) -> str:
        """Say why an agent is none of this run's, or not in its place; empty if it is."""
        if (hello.job_id, hello.attempt) != (info.job_id, info.attempt):
            return f"it is of job {hello.job_id} attempt {hello.attempt}, this is {info.job_id} {info.attempt}"
        if not 0 <= hello.node_rank < len(self.nodes):
            return f"there is no place {hello.node_rank}"
        node = self.nodes[hello.node_rank]
        node.name = node.name or hello.node  # where there is no launcher, who comes first has the place
        return "" if node.name == hello.node else f"place {hello.node_rank} is that of node {node.name}"

    def close(self) -> None:
        """Stop."""
        self._closing.set()
        self._thread.join(timeout=10)
        if self._server is not None:
            self._server.close()
        for node in self.nodes:
            if node.channel is not None:
                node.channel.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                call = self._inbox.get(timeout=TICK_S)
            except queue.Empty:
                call = None
            try:
                if call is not None:
                    call()
                self._turn(time.monotonic())
            except Exception:  # top of a thread: the leader must not die of one bad message
                log.exception("leader_error")

    def _serve(self, channel: Channel) -> None:
        """Thread of a connection."""
        try:
            while not self._closing.is_set():
                with contextlib.suppress(ChannelTimeoutError):
                    message = p.from_wire(channel.recv(timeout_s=60))
                    self._inbox.put(lambda message=message: self._hear(channel, message))  # type: ignore[misc] # bound now
        except ChannelClosedError:
            pass
        except DataError as error:
            event(log, "bad_message", level=logging.WARNING, peer=channel.peer, why=str(error))
        finally:
            channel.close()
            self._inbox.put(lambda: self._gone(channel))
