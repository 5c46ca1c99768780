"""Prolog: make the job's burst buffer directory for its user."""

from __future__ import annotations

import os
import stat
import sys

from slurm_resil.hooks import base, sweep

_NO_ROOM = (28, 122)  # ENOSPC and EDQUOT of Linux


def prolog(env: dict[str, str], config: dict[str, object]) -> None:
    """Make ``<bb_root>/job-<id>``, mode 0700; one that the job's user has from an earlier attempt is kept.

    Raises:
        HookError: The burst buffer is not there: no job can run on this node.
    """
    if not base.wanted(env, config):
        return
    job, uid = base.number(env, "SLURM_JOB_ID"), base.number(env, "SLURM_JOB_UID")
    gid = base.number(env, "SLURM_JOB_GID") if env.get("SLURM_JOB_GID") else _gid(uid)
    name = f"job-{job}"
    root = base.open_root(config)
    try:
        sweep.unmark(root, name)  # it is in use again
        sweep.sweep(config, root, name)
        try:
            info = os.stat(name, dir_fd=root, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISDIR(info.st_mode) and info.st_uid == uid:
                return
            # job ids come round again: what another user has left is not thrown away, and not given to this one
            aside = f"{name}.of-{info.st_uid}.{os.urandom(4).hex()}"
            os.rename(name, aside, src_dir_fd=root, dst_dir_fd=root)
            base.note(config, "set_aside", job=job, kept=aside, owner=info.st_uid)
        os.mkdir(name, 0o700, dir_fd=root)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        try:
            os.fchown(fd, uid, gid)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _NO_ROOM:
            # a user has filled it: Slurm would drain the node and hold the next user's job for that
            base.note(config, "no_room", job=job, why=error.strerror)
            return
        raise base.HookError(f"cannot make {config['bb_root']}/{name}: {error.strerror}") from error
    finally:
        os.close(root)


def _gid(uid: int) -> int:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return uid


if __name__ == "__main__":
    sys.exit(base.main(prolog, sys.argv[1:]))
