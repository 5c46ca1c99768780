"""MUNGE credentials through libmunge: who sent this, proven by the cluster's own key.

Source: munge(3), munge_ctx(3), munge_enum(3). The library is loaded on first use, so that hosts without it can run
everything that does not cross hosts.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_resil.core.errors import NotPermittedError, ServiceError

_OPT_TTL, _OPT_SOCKET, _OPT_UID_RESTRICTION = 4, 8, 9
_SUCCESS = 0
# a credential that says something wrong, as opposed to a daemon that does not answer
_BAD_CREDENTIAL = range(8, 19)
_AUTH_INFO = re.compile(r"^\s*AuthInfo\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)
_SLURM_CONF = "/etc/slurm/slurm.conf"


@dataclass(frozen=True, kw_only=True)
class Credential:
    """What a decoded credential says."""

    payload: bytes
    uid: int
    gid: int


@functools.cache
def _library() -> ctypes.CDLL:
    for name in ("libmunge.so.2", ctypes.util.find_library("munge")):
        if name is None:
            continue
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.munge_ctx_create.restype = ctypes.c_void_p
        library.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
        library.munge_ctx_strerror.restype = ctypes.c_char_p
        library.munge_ctx_strerror.argtypes = [ctypes.c_void_p]
        library.munge_strerror.restype = ctypes.c_char_p
        library.munge_encode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
        library.munge_decode.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 5]
        return library
    raise ServiceError("libmunge is not installed", mend="install libmunge2 (Debian) or munge-libs (RPM)")


def _free(memory: ctypes.c_void_p) -> None:
    if memory.value:
        ctypes.CDLL(None).free(memory)


def installed() -> bool:
    """Whether libmunge can be loaded; says nothing about the daemon."""
    try:
        _library()
    except ServiceError:
        return False
    return True


def socket_path(env: Mapping[str, str]) -> str | None:
    """Socket of munged: ``MUNGE_SOCKET``, or AuthInfo of slurm.conf; None means libmunge's default."""
    if env.get("MUNGE_SOCKET"):
        return env["MUNGE_SOCKET"]
    try:
        with open(env.get("SLURM_CONF") or _SLURM_CONF, encoding="utf-8", errors="replace") as file:
            match = _AUTH_INFO.search(file.read())
    except OSError:
        return None
    for option in match[1].split(",") if match else ():
        name, _, value = option.partition("=")
        if name.lower() == "socket" and value:
            return value
    return None


class Munge:
    """Encode and decode credentials.

    Args:
        socket: Socket of munged, None for the library's default.
        ttl_s: Seconds for which a credential can be decoded, 0 for munged's default (5 min).
    """

    def __init__(self, socket: str | None = None, *, ttl_s: int = 60) -> None:
        self.socket = socket
        self.ttl_s = ttl_s

    def encode(self, payload: bytes, *, uid: int | None = None) -> str:
        """Make a credential of this process's uid.

        Args:
            payload: Bytes inside; nobody but the receiver can read them.
            uid: The only user that may decode it, None for any.

        Raises:
            ServiceError: munged does not answer.
        """
        library = _library()
        context = self._context(library, uid)
        text = ctypes.c_void_p()
        try:
            code = library.munge_encode(ctypes.byref(text), context, payload, len(payload))
            self._check(library, context, code, "encode")
            return ctypes.string_at(text.value or 0).decode("ascii")
        finally:
            _free(text)
            library.munge_ctx_destroy(context)

    def decode(self, credential: str) -> Credential:
        """Check a credential; each can be decoded once only.

        Raises:
            NotPermittedError: Forged, expired, replayed, or meant for another user.
            ServiceError: munged does not answer.
        """
        library = _library()
        context = self._context(library, None)
        data, size = ctypes.c_void_p(), ctypes.c_int()
        uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
        try:
            code = library.munge_decode(
                credential.encode("ascii", "replace"),
                context,
                *(ctypes.byref(out) for out in (data, size, uid, gid)),
            )
            self._check(library, context, code, "decode")
            payload = ctypes.string_at(data.value, size.value) if data.value else b""
            return Credential(payload=payload, uid=uid.value, gid=gid.value)
        finally:
            _free(data)
            library.munge_ctx_destroy(context)

    def _context(self, library: ctypes.CDLL, uid: int | None) -> ctypes.c_void_p:
        context = ctypes.c_void_p(library.munge_ctx_create())
        if not context.value:
            raise ServiceError("libmunge has no memory for a context")
        options: list[tuple[int, ctypes.c_char_p | ctypes.c_int | ctypes.c_uint32]] = []
        if self.socket:
            options.append((_OPT_SOCKET, ctypes.c_char_p(os.fsencode(self.socket))))
        if self.ttl_s:
            options.append((_OPT_TTL, ctypes.c_int(self.ttl_s)))
        if uid is not None:
            options.append((_OPT_UID_RESTRICTION, ctypes.c_uint32(uid)))
        for option, value in options:
            self._check(library, context, library.munge_ctx_set(context, ctypes.c_int(option), value), "set up")
        return context

    def _check(self, library: ctypes.CDLL, context: ctypes.c_void_p, code: int, what: str) -> None:
        if code == _SUCCESS:
            return
        words = library.munge_ctx_strerror(context) or library.munge_strerror(code) or b"unknown error"
        message = f"munge cannot {what} a credential: {words.decode(errors='replace')}"
        if code in _BAD_CREDENTIAL:
            raise NotPermittedError(message)
        raise ServiceError(message, mend="check that munged runs on this host", socket=self.socket or "default")
