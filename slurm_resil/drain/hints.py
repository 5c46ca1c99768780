"""MPI-IO hints for a file system: the site's, else what was measured to be right for its kind."""

from __future__ import annotations

import os
from collections.abc import Mapping

PARALLEL = frozenset(("lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "pvfs2", "panfs", "wekafs", "daos", "dvs"))
NARROW_BYTES = 512  # below this mean size of a run, a write call for each is slower than exchanging the data (measured)
_MOUNTS = "/proc/self/mountinfo"
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


def file_system(path: str, mountinfo: str | None = None) -> str:
    """Type of the file system that holds a path (``ext4``, ``lustre``...); empty if it is not known.

    Args:
        path: Any existing path.
        mountinfo: Text of ``/proc/self/mountinfo``; read if not given.
    """
    if mountinfo is None:
        try:
            with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
                mountinfo = file.read()
        except OSError:
            return ""
    path = os.path.realpath(path)
    best, kind = "", ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = fields[4]
        for escape, plain in _ESCAPES:
            point = point.replace(escape, plain)
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two mounts on one point the later one is seen
            best, kind = point, right.split(" ")[0]
    return kind


def choose(path: str, *, runs: int, nbytes: int, site: Mapping[str, str] | None = None) -> dict[str, str]:
    """Choose the hints for a drain.

    Args:
        path: Directory of the file.
        runs: Contiguous ranges that are written, all ranks.
        nbytes: Bytes that are written, all ranks.
        site: The site's hints; they replace ours one by one.
    """
    hints: dict[str, str] = {}
    if file_system(path) not in PARALLEL:
        mode = "enable" if runs and nbytes / runs < NARROW_BYTES else "disable"
        hints = {"romio_cb_write": mode, "romio_ds_write": "disable"}
    hints.update(site or {})
    return hints
