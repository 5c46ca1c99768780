"""How a process ends that one of our errors ends: with that error's exit code, so that whoever started it can tell."""

from __future__ import annotations

import sys
from types import TracebackType

from slurm_resil.core.errors import ResilError


def install() -> None:
    """Have an uncaught error of ours end Python with its own exit code, where starting again would not help.

    The hook that was there prints what it always does. Safe to call again.
    """
    before = sys.excepthook
    if getattr(before, "resil", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, ResilError) and error.final:
            raise SystemExit(error.exit_code)  # in a hook this is how to choose the code: Python ends in order

    hook.resil = True  # type: ignore[attr-defined] # a mark of ours on our function
    sys.excepthook = hook
