"""slurm_resil: keeps large training jobs on Slurm alive.

Public names are loaded on first use, so that hooks and the command line start without torch, h5py or numpy.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost the hooks as much time as the interpreter does
if TYPE_CHECKING:
    from slurm_resil.ckpt.options import LoadOptions as LoadOptions
    from slurm_resil.ckpt.state import Sharded as Sharded
    from slurm_resil.core.errors import ResilError as ResilError
    from slurm_resil.format.manifest import Extent as Extent
    from slurm_resil.integrations import dcp as dcp
    from slurm_resil.session import Checkpointer as Checkpointer
    from slurm_resil.session.loading import load as load
    from slurm_resil.session.standalone import async_save as async_save

__version__ = "0.1.0"

_PUBLIC = {
    "Checkpointer": "slurm_resil.session",
    "Extent": "slurm_resil.format.manifest",
    "LoadOptions": "slurm_resil.ckpt.options",
    "ResilError": "slurm_resil.core.errors",
    "Sharded": "slurm_resil.ckpt.state",
    "async_save": "slurm_resil.session.standalone",
    "load": "slurm_resil.session.loading",
}
_MODULES = {"dcp": "slurm_resil.integrations.dcp"}
__all__ = [
    "Checkpointer",
    "Extent",
    "LoadOptions",
    "ResilError",
    "Sharded",
    "__version__",
    "async_save",
    "dcp",
    "load",
]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _MODULES:
        import importlib

        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'slurm_resil' has no attribute {name!r}")
