"""What a training script uses: a Checkpointer."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_resil.core.errors import ServiceError


class Checkpointer:
    """Saves and restores one training state.

    Use it as a context manager; see :meth:`from_env`.
    """

    @classmethod
    def from_env(
        cls,
        state: Mapping[str, object],
        *,
        every: int | None = None,
        backpressure: str = "skip",
        strict: bool = False,
    ) -> Checkpointer:
        """Make one from the environment of the rank; works without any, too.

        Args:
            state: What is saved: modules, optimizers, objects with ``state_dict``, tensors, arrays, plain values.
            every: Save whenever the iteration is a multiple of this; default ``SLURM_RESIL_EVERY``.
            backpressure: What a save of the cadence does when no slot is free: ``skip``, ``wait`` or ``fail``.
            strict: Raise when a save fails, instead of reporting it and going on.
        """
        raise ServiceError("the session is on its way")

    def restore(self, *, private: str = "error") -> int:
        """Load the newest checkpoint that all ranks can load; returns its iteration, 0 for a fresh start."""
        return 0

    def step(self, iteration: int) -> bool:
        """Say that an iteration is complete. True: everything is safe, and training must end now."""
        return False

    def poll(self) -> bool:
        """Whether a stop was asked for; for long loops without iterations (evaluation, warm-up)."""
        return False

    def save(self, iteration: int) -> bool:
        """Save now; all ranks must call it at the same iteration. False: it was skipped or failed."""
        return False

    def close(self) -> None:
        """Wait for what is being sealed, and leave."""

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
