"""How the two ends of a channel prove who they are: by MUNGE, or by a key file that only its owner can read.

Both give a session key that nobody else has. The server states its uid and a nonce; the client answers; the first
message of the server under the session key is its own proof.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from slurm_resil.comm.munge import Munge, socket_path
from slurm_resil.core import paths
from slurm_resil.core.errors import NotPermittedError, ServiceError

PURPOSE = "slurm_resil channel 1"
KEY_BYTES = 32


class Auth(Protocol):
    """One way of proving it."""

    name: str

    def answer(self, hello: Mapping[str, Any], server_uids: Collection[int]) -> tuple[dict[str, str], bytes]:
        """Client: answer the server's hello; returns the reply and the session key.

        Raises:
            NotPermittedError: The server is none of ``server_uids``.
        """

    def check(self, nonce: str, reply: Mapping[str, Any]) -> tuple[bytes, int]:
        """Server: check the reply; returns the session key and the client's uid.

        Raises:
            NotPermittedError: The reply proves nothing.
        """


class MungeAuth:
    """MUNGE: the credential carries the nonce and the session key, and only the server's uid can open it."""

    name = "munge"

    def __init__(self, socket: str | None = None) -> None:
        self._munge = Munge(socket)

    def answer(self, hello: Mapping[str, Any], server_uids: Collection[int]) -> tuple[dict[str, str], bytes]:
        """See :meth:`Auth.answer`."""
        uid = hello.get("uid")
        if not isinstance(uid, int) or uid not in server_uids:
            raise NotPermittedError(f"the server says that it is uid {uid}, expected {_list(server_uids)}")
        key = secrets.token_bytes(KEY_BYTES)
        payload = {"purpose": PURPOSE, "nonce": hello.get("nonce"), "key": key.hex()}
        return {"credential": self._munge.encode(json.dumps(payload).encode(), uid=uid)}, key

    def check(self, nonce: str, reply: Mapping[str, Any]) -> tuple[bytes, int]:
        """See :meth:`Auth.check`."""
        opened = self._munge.decode(str(reply.get("credential")))
        try:
            payload = json.loads(opened.payload)
            key = bytes.fromhex(payload["key"])
            good = payload["purpose"] == PURPOSE and hmac.compare_digest(payload["nonce"], nonce)
        except (ValueError, KeyError, TypeError) as error:
            raise NotPermittedError(f"uid {opened.uid} sent a credential for something else") from error
        if not good or len(key) != KEY_BYTES:
            raise NotPermittedError(f"uid {opened.uid} sent a credential for another connection")
        return key, opened.uid


class KeyAuth:
    """A shared key in a file of mode 0600: for hosts without MUNGE that share a file system (or are one host)."""

    name = "key"

    def __init__(self, path: str) -> None:
        self.path = path

    def create(self) -> KeyAuth:
        """Make the key unless there is one."""
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return self
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        return self

    def answer(self, hello: Mapping[str, Any], server_uids: Collection[int]) -> tuple[dict[str, str], bytes]:
        """See :meth:`Auth.answer`."""
        own = os.getuid()
        if hello.get("uid") != own or own not in server_uids:
            raise NotPermittedError(f"the server says that it is uid {hello.get('uid')}, a key file proves uid {own}")
        nonce = secrets.token_hex(KEY_BYTES)
        key = self._session(str(hello.get("nonce")), nonce)
        return {"nonce": nonce, "proof": _mac(key, b"client")}, key

    def check(self, nonce: str, reply: Mapping[str, Any]) -> tuple[bytes, int]:
        """See :meth:`Auth.check`."""
        key = self._session(nonce, str(reply.get("nonce")))
        if not hmac.compare_digest(_mac(key, b"client"), str(reply.get("proof"))):
            raise NotPermittedError(f"the client does not have the key of {self.path}", path=self.path)
        return key, os.getuid()

    def _session(self, server_nonce: str, client_nonce: str) -> bytes:
        return hmac.digest(self._read(), f"{PURPOSE}|{server_nonce}|{client_nonce}".encode(), "sha256")

    def _read(self) -> bytes:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise NotPermittedError(f"cannot read the key {self.path}: {error.strerror}", path=self.path) from error
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(file.fileno())
            if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
                raise NotPermittedError(
                    f"the key {self.path} can be read by others", mend="chmod 600 it, or remove it", path=self.path
                )
            key = file.read()
        if len(key) < KEY_BYTES:
            raise NotPermittedError(f"the key {self.path} has {len(key)} bytes", mend="remove it", path=self.path)
        return key


def server_auth(run_dir: str) -> Auth:
    """Choose the way for a leader: MUNGE where it works here, else a key file in the run's directory."""
    socket = socket_path(os.environ)
    try:
        Munge(socket).encode(b"")
    except ServiceError:
        return KeyAuth(paths.leader_key(run_dir)).create()
    return MungeAuth(socket)


def client_auth(run_dir: str, name: str) -> Auth:
    """Choose the way that a leader has named (``munge`` or ``key``)."""
    return KeyAuth(paths.leader_key(run_dir)) if name == KeyAuth.name else MungeAuth(socket_path(os.environ))


def _mac(key: bytes, data: bytes) -> str:
    return hmac.digest(key, data, hashlib.sha256).hex()


def _list(uids: Collection[int]) -> str:
    return " or ".join(str(uid) for uid in sorted(uids)) or "nobody"
