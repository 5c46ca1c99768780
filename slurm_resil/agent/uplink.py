"""The agent's connection to its leader: found again, with back-off, whenever it breaks."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from slurm_resil.agent import protocol as p
from slurm_resil.comm.auth import client_auth
from slurm_resil.comm.channel import Channel, ChannelClosedError, ChannelTimeoutError, connect
from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError, NotPermittedError, ServiceError
from slurm_resil.core.log import event

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LeaderPlace:
    """How to find the leader.

    Attributes:
        run_dir: Run's directory, with ``leader.json``.
        job_id: Job.
        attempt: Attempt; a leader of another one is not ours. None: the newest one.
        address: ``host:port`` that the launcher gave, or None.
    """

    run_dir: str
    job_id: int
    attempt: int | None
    address: str | None = None

    def connect(self, *, timeout_s: float = 5.0) -> Channel:
        """Connect: to the leader on record, else to the address that the launcher gave.

        Raises:
            ServiceError: There is none, or it does not answer.
            NotPermittedError: It does not accept us, or is not our user.
        """
        address, auth = self.address, ""
        try:
            raw = fsio.read_json(paths.leader(self.run_dir))
            if raw["job_id"] == self.job_id and self.attempt in (None, raw["attempt"]):
                address, auth = str(raw["address"]), str(raw["auth"])
        except (OSError, DataError, KeyError, TypeError):
            pass
        if not address:
            raise ServiceError(f"no leader is on record in {self.run_dir}", path=paths.leader(self.run_dir))
        return connect(address, auth=client_auth(self.run_dir, auth), server_uids={os.getuid()}, timeout_s=timeout_s)


def publish_leader(run_dir: str, address: str, auth: str, *, job_id: int, attempt: int) -> None:
    """Say where the leader is, for :class:`LeaderPlace`.

    Args:
        run_dir: Run's directory.
        address: ``host:port``.
        auth: Name of the way in which agents prove who they are.
        job_id: Job.
        attempt: Attempt.
    """
    document = {"address": address, "auth": auth, "job_id": job_id, "attempt": attempt, "pid": os.getpid()}
    try:
        fsio.write_json(paths.leader(run_dir), document)
    except OSError as error:
        mend = "make the prefix writable: agents on other nodes cannot find a new leader"
        event(log, "leader_not_published", level=logging.ERROR, path=run_dir, why=str(error), mend=mend)


class Uplink:
    """Keeps a connection.

    Args:
        dial: Makes a connection.
        opened: Called with each new one, before anything is received.
        heard: Called with each message.
        closed: Called when it is gone.

    All three are called in the uplink's thread.
    """

    def __init__(
        self,
        dial: Callable[[], Channel],
        *,
        opened: Callable[[Channel], None],
        heard: Callable[[p.Message], None],
        closed: Callable[[], None],
    ) -> None:
        self._dial, self._opened, self._heard, self._closed = dial, opened, heard, closed
        self._closing = threading.Event()
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._run, name="uplink", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End for good."""
        self._closing.set()
        if self._channel is not None:
            self._channel.close()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        pause, said = FIRST_PAUSE_S, ""
        while not self._closing.is_set():
            try:
                self._channel = channel = self._dial()
            except (ServiceError, NotPermittedError) as error:
                if str(error) != said:
                    said = str(error)
                    event(log, "no_leader", level=logging.WARNING, why=said)
                self._closing.wait(pause)
                pause = min(LONGEST_PAUSE_S, 2 * pause)
                continue
            pause, said = FIRST_PAUSE_S, ""
            self._opened(channel)
            self._receive(channel)
            self._closed()

    def _receive(self, channel: Channel) -> None:
        try:
            while not self._closing.is_set():
                with contextlib.suppress(ChannelTimeoutError):
                    self._heard(p.from_wire(channel.recv(timeout_s=60)))
        except ChannelClosedError as error:
            if not self._closing.is_set():
                event(log, "leader_gone", level=logging.WARNING, why=str(error))
        except DataError as error:
            event(log, "bad_message", level=logging.ERROR, why=str(error))
        finally:
            channel.close()
