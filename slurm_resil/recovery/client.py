"""What a launcher asks of the engine, as the job's owner."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from slurm_resil.comm.auth import MungeAuth
from slurm_resil.comm.channel import connect
from slurm_resil.comm.munge import socket_path
from slurm_resil.core.errors import NotPermittedError, ServiceError

TIMEOUT_S = 15.0


class EngineClient:
    """Asks an engine.

    Args:
        address: ``host:port``.
        server_uids: Users that the engine may run as.
    """

    def __init__(self, address: str, server_uids: Sequence[int] = (0,)) -> None:
        self._address, self._server_uids = address, tuple(server_uids)

    def register(self, job_id: int) -> str:
        """Have the job looked after when its launcher is gone; raises as :meth:`continue_job`."""
        return self._ask({"ask": "register", "job": job_id})

    def continue_job(self, job_id: int, *, bad_nodes: Sequence[str], reason: str, level: str) -> str:
        """Have the job started again; returns words once the engine has taken it over.

        Raises:
            ServiceError: It does not answer, or not now.
            NotPermittedError: It refuses.
        """
        return self._ask(
            {"ask": "continue", "job": job_id, "bad_nodes": list(bad_nodes), "reason": reason, "level": level}
        )

    def _ask(self, request: dict[str, Any]) -> str:
        auth = MungeAuth(socket_path(os.environ))
        channel = connect(self._address, auth=auth, server_uids=self._server_uids, timeout_s=TIMEOUT_S)
        try:
            channel.send(request)
            answer = channel.recv(timeout_s=TIMEOUT_S)
        finally:
            channel.close()
        words = str(answer.get("words"))
        if answer.get("ok") is True:
            return words
        raise (ServiceError if answer.get("permitted") else NotPermittedError)(words, engine=self._address)
