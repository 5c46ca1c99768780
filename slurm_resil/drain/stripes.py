"""How a file is spread over the servers of a Lustre file system: set on the directory before the file is made.

MPI sets it only for files that it makes itself.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from slurm_resil.core.errors import StorageError
from slurm_resil.drain import hints

FACTOR, UNIT = "striping_factor", "striping_unit"
_LIMIT_S = 60.0


def possible(directory: str) -> str:
    """Say why files in a directory cannot be spread; empty if they can."""
    kind = hints.file_system(directory)
    if kind != "lustre":
        return f"{directory} is on {kind or 'an unknown file system'}, which has no stripes to set"
    if shutil.which("lfs") is None:
        return f"{directory} is on lustre, but there is no lfs to set its stripes with"
    return ""


def spread(directory: str, site: Mapping[str, str]) -> None:
    """Let new files in a directory be spread as the hints say; nothing where there are none, or no stripes.

    Raises:
        StorageError: ``lfs`` refused.
    """
    wanted = [(option, site[key]) for option, key in (("-c", FACTOR), ("-S", UNIT)) if key in site]
    if not wanted or possible(directory):
        return
    argv = [shutil.which("lfs") or "lfs", "setstripe", *(word for pair in wanted for word in pair), directory]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise StorageError(f"{' '.join(argv)} did not end within {_LIMIT_S:.0f} s") from error
    if done.returncode:
        raise StorageError(
            f"{' '.join(argv)}: {done.stderr.strip()[-300:]}", mend=f"look at {FACTOR} and {UNIT} in [drain] hints"
        )
