"""What both hooks share: configuration, the job, the log. Everything that a user can write is taken as hostile."""

from __future__ import annotations

import os
import sys
import time

DEFAULT_CONFIG = "/etc/slurm-resil/hooks.json"
_KEYS = {"bb_root": str, "always": bool, "log": str, "late": bool, "late_limit": str, "keep": str}
_SECONDS = ("late_limit", "keep")
_WORDS = {"true": True, "false": False}


class HookError(Exception):
    """The site is wrong: the hook fails and Slurm drains the node."""


def load_config(path: str) -> dict[str, object]:
    """Read hooks.json, which only root may have written.

    Raises:
        HookError: It is missing, writable by others, or says something else than it should.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise HookError(f"cannot read {path}: {error.strerror}; write it with `slurm-resil site render`") from error
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(file.fileno())
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise HookError(f"{path} can be written by others; chown root and chmod 644 it")
        try:
            text = file.read(1 << 20).decode()
            raw = _flat(text) or _json(text)
        except ValueError as error:
            raise HookError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise HookError(f"{path} is not a JSON object")
    faults = [f"unknown key {key!r}" for key in raw if key not in _KEYS]
    faults += [
        f"{key} is {raw[key]!r}, a {kind.__name__} is needed"
        for key, kind in _KEYS.items()
        if key in raw and not isinstance(raw[key], kind)
    ]
    faults += [
        f'{key} is {raw[key]!r}, seconds are needed, as in "3600"' for key in _SECONDS if not _whole(raw.get(key))
    ]
    if not str(raw.get("bb_root", "")).startswith("/"):
        faults.append(f"bb_root is {raw.get('bb_root')!r}, a path is needed, as in /local/slurm-resil")
    if faults:
        raise HookError(f"{path}: " + "; ".join(faults))
    return raw


def _whole(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.isascii() and value.isdigit() and 0 < int(value) < 10**9)


def _json(text: str) -> object:
    import json  # takes longer than all else that a hook does

    return json.loads(text)


def _flat(text: str) -> dict[str, object] | None:
    """Read what ``slurm-resil site render`` writes: texts, true and false. None: it takes more than this to read it."""
    parts = text.split('"')
    between, texts = [part.strip() for part in parts[::2]], parts[1::2]
    if "\\" in text or len(parts) % 2 == 0 or between[0] != "{" or not all(part.isprintable() for part in texts):
        return None
    found: dict[str, object] = {}
    at = 0
    while at < len(texts):
        key, after = texts[at], between[at + 1]
        at += 1
        if after == ":" and at < len(texts):
            found[key], after = texts[at], between[at + 1]
            at += 1
        else:
            word = after[1:-1].strip()
            if after[:1] != ":" or word not in _WORDS:
                return None
            found[key], after = _WORDS[word], after[-1]
        if after != ("," if at < len(texts) else "}"):
            return None
    return found or None


def number(env: dict[str, str], name: str) -> int:
    """A variable that Slurm sets, digits only.

    Raises:
        HookError: It is something else.
    """
    value = env.get(name, "")
    if not (value.isascii() and value.isdigit() and len(value) <= 10):
        raise HookError(f"{name} is {value!r}, a number is needed")
    return int(value)


def wanted(env: dict[str, str], config: dict[str, object]) -> bool:
    """Whether the job has the feature on: by the SPANK plugin, or the site has it on for all."""
    return bool(config.get("always")) or env.get("SPANK_SLURM_RESIL") == "1"


def note(config: dict[str, object], event: str, **fields: object) -> None:
    """Append a line to the site's log; without one say it on standard error."""
    import json

    line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n"
    path = config.get("log")
    if isinstance(path, str) and path:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        except OSError as error:
            sys.stderr.write(f"slurm_resil: cannot write {path}: {error.strerror}\n")
        else:
            os.write(fd, line.encode())
            os.close(fd)
            return
    sys.stderr.write(line)


def open_root(config: dict[str, object]) -> int:
    """Open the burst buffer's root, which only root may change.

    Raises:
        HookError: It is missing, or others can change what is in it.
    """
    path = str(config["bb_root"])
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise HookError(f"the burst buffer {path}: {error.strerror}; make it, owned by root, mode 755") from error
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        os.close(fd)
        raise HookError(f"the burst buffer {path} can be written by others; chown root and chmod 755 it")
    return fd


def main(body: object, argv: list[str]) -> int:
    """Run a hook: 0, or 1 when the site is wrong and the node cannot serve."""
    path = DEFAULT_CONFIG
    if len(argv) == 2 and argv[0] == "--config":
        path = argv[1]
    elif argv:
        sys.stderr.write("usage: [--config FILE]\n")
        return 2
    try:
        body(dict(os.environ), load_config(path))  # type: ignore[operator]  # typing.Callable costs start-up time
    except HookError as error:
        sys.stderr.write(f"slurm_resil: {error}\n")
        return 1
    return 0
