"""Files that a test has made as root, given to who works with them."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_resil.sandbox import Sandbox


def own(cluster: Sandbox, top: Path) -> None:
    """Give a tree to alice; numbers, because this host does not know her."""
    uid, gid = (int(cluster.run(["id", flag, "alice"]).stdout) for flag in ("-u", "-g"))
    for where, _, names in os.walk(top):
        for name in (".", *names):
            os.chown(os.path.join(where, name), uid, gid)
