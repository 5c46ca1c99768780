"""One tree of errors. Each type carries the exit code of the command line and whether trying again may help."""

from __future__ import annotations

import os
from typing import ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_BAD_DATA = 65
EXIT_NO_SERVICE = 69
EXIT_TRY_AGAIN = 75
EXIT_NOT_PERMITTED = 77
EXIT_CONFIG = 78


class ResilError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        message: What is wrong, in one sentence, with what was read.
        mend: What the reader can do about it, in one sentence.
        context: What the error is about (``path``, ``job``, ``node``, ``rank``, ``key``...).

    Attributes:
        exit_code: Exit status of a command that ends with this error.
        retryable: Whether the same call may succeed later without any change.
        told: Whether it was written as JSON already.
    """

    exit_code: ClassVar[int] = EXIT_FAILED
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, mend: str = "", **context: object) -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend
        self.context = context
        self.told = False

    @property
    def final(self) -> bool:
        """Whether the same call would end the same way again: nobody starts it again by himself."""
        return not self.retryable and self.exit_code != EXIT_FAILED

    def __str__(self) -> str:
        tail = "".join(f" [{key}: {value}]" for key, value in self.context.items() if str(value) not in self.message)
        mend = f"; {self.mend}" if self.mend else ""
        return f"{self.message}{mend}{tail}"


class UsageError(ResilError):
    """A call that cannot mean anything: bad argument, bad combination."""

    exit_code = EXIT_USAGE


class ConfigError(ResilError):
    """Configuration that cannot work; ``faults`` lists every fault found, not only the first."""

    exit_code = EXIT_CONFIG

    def __init__(self, message: str, *, mend: str = "", faults: tuple[str, ...] = (), **context: object) -> None:
        super().__init__(message, mend=mend, **context)
        self.faults = faults

    def __str__(self) -> str:
        return "\n  - ".join((super().__str__(), *self.faults))


class DataError(ResilError):
    """Stored bytes that are not what they claim to be: torn, flipped, truncated, swapped, stale."""

    exit_code = EXIT_BAD_DATA


class NotRestoredError(DataError):
    """This start restores nothing, another one may: bad checkpoints are not tried twice, and the state is new then."""

    exit_code = EXIT_FAILED
    retryable = True


class StateError(ResilError):
    """A training state that cannot be stored or does not fit what is stored; names the path in the state."""

    exit_code = EXIT_BAD_DATA


class ServiceError(ResilError):
    """A service did not answer: its state is unknown, and unknown takes no action."""

    exit_code = EXIT_NO_SERVICE
    retryable = True


class NotPermittedError(ResilError):
    """The service answered that this user may not do this."""

    exit_code = EXIT_NOT_PERMITTED


class NoSuchJobError(NotPermittedError):
    """Slurm has no such job, or none any more."""

    exit_code = EXIT_USAGE


class TryAgainError(ResilError):
    """Not now: a slot is busy, a level is not reached yet, a resource is taken."""

    exit_code = EXIT_TRY_AGAIN
    retryable = True


class StoppedError(TryAgainError):
    """Asked to end, by a signal or an order, before it was done."""


class SpaceError(ResilError):
    """Storage is full, too small, read-only or over quota; names the path and both sizes."""


class CapacityError(SpaceError):
    """Storage could not hold what is needed even if it were empty: a new start does not mend that."""

    exit_code = EXIT_CONFIG


class RefusedError(SpaceError):
    """Storage that does not let this user write: read-only, or no permission. Waiting does not help."""


class StorageError(ResilError):
    """Storage failed in a way that may pass: an input or output error, a stale handle, a server that is away."""

    retryable = True


def missing_path(path: str | os.PathLike[str], what: str, mend: str) -> ConfigError:
    """Build the error for a configured path that does not exist."""
    return ConfigError(f"{what} {path} does not exist", mend=mend, path=path)
