"""``python -m slurm_resil.launch.mark PATH TEXT``: write a small file by rename, or remove it if the text is empty.

Run by srun on the nodes of a job, for marks in their burst buffers. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import sys


def write(path: str, text: str) -> None:
    """Write or remove the file; a directory that is missing is no error: there is nothing to keep there then."""
    if not text:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    temp = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        with open(temp, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temp, path)


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2])
