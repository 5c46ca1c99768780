"""How one rank's state gets into a slot and back, as the session sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from slurm_resil.agent.place import Place
from slurm_resil.ckpt.options import LoadOptions
from slurm_resil.core.background import Background

Private = Literal["error", "fresh", "rank_mod"]


class StateStore(Protocol):
    """How one rank's state gets into a slot and back."""

    def write(self, index: int, iteration: int) -> str:
        """Copy the state as it is now into a slot; returns the draft of its manifest, see ``format.draft``."""

    def start(self, index: int, iteration: int) -> Callable[[], str]:
        """Copy a part at once; the call that is returned does the rest, in another thread, and returns the draft."""

    def want(self) -> str:
        """Say in the burst buffer how slots should be laid out for the state as it is; returns the layout's name."""

    def take(self, indices: tuple[int, ...]) -> None:
        """Map slots that hold nothing of worth."""

    def load_local(self, iteration: int) -> None:
        """Load this rank's sealed shard. Raises DataError if it is not what it claims to be."""

    def load_shards(self, iteration: int) -> None:
        """Load from the shards of all ranks that saved, which are all on this node. Raises DataError as the others."""

    def load_drained(self, iteration: int) -> None:
        """Load from the drained file. Raises DataError if it is not what it claims to be."""

    def close(self) -> None:
        """Take back what was changed in the state's objects."""


def slot_store(
    place: Place,
    state: Mapping[str, object],
    helpers: Sequence[Background],
    slots: int,
    private: Private,
    options: LoadOptions,
) -> StateStore:
    """Make the real one; here torch is imported.

    Args:
        place: This rank's.
        state: What is saved.
        helpers: Threads that verify beside the one that restores.
        slots: Number of slots.
        private: As for ``Checkpointer.restore``.
        options: As for ``Checkpointer.restore``.

    Raises:
        StateError: Something in the state cannot be stored.
        CapacityError: The burst buffer is too small for it.
    """
    from slurm_resil.catalog import LocalCatalog, RunCatalog
    from slurm_resil.ckpt.store import SlotStore

    local = LocalCatalog(place.job_dir, run_id=place.info.run_id)
    return SlotStore(
        state,
        job_dir=place.job_dir,
        run_dir=place.run_dir,
        info=place.info,
        rank=place.rank,
        node=place.node,
        ranks_on_node=place.ranks_per_node,
        slots=slots,
        private=private,
        options=options,
        helpers=helpers,
        shard=lambda iteration: local.load(iteration, place.rank),
        shards=local.all_ranks,
        drained=RunCatalog(place.run_dir, run_id=place.info.run_id).load,
    )
