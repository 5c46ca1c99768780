"""How one rank's state gets into its slots and back: what a session uses of this package."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.lazy import Hooks
from slurm_resil.ckpt.memo import Memo
from slurm_resil.ckpt.options import LoadOptions
from slurm_resil.ckpt.private import Policy
from slurm_resil.ckpt.restore import restore_drained, restore_local, restore_shards
from slurm_resil.ckpt.slotfile import LEAST_SLOTS, capacity, check_capacity
from slurm_resil.ckpt.snapshot import Arena
from slurm_resil.core import garbage
from slurm_resil.core import sets as node_sets
from slurm_resil.core.background import Background
from slurm_resil.core.model import RunInfo
from slurm_resil.format import staged
from slurm_resil.format.manifest import DrainedManifest, ShardManifest

_WORTH_TELLING_S = 0.5
log = logging.getLogger(__name__)


class SlotStore:
    """See the module.

    Args:
        state: Training state.
        job_dir: Job's directory in the burst buffer.
        run_dir: Run's directory on the parallel file system.
        info: Run.
        rank: Global rank.
        node: Name of this node.
        ranks_on_node: Ranks that share the burst buffer.
        slots: Number of slots.
        private: What becomes of rank-private state when the number of ranks has changed.
        options: What a restore may leave out or convert.
        helpers: Threads that verify beside the one that restores.
        shard: Finds the manifest of this rank's sealed shard of an iteration.
        shards: Finds those of all ranks that saved it on this node.
        drained: Finds the manifest of the drained file of an iteration.

    Raises:
        StateError: Something in the state cannot be stored.
        CapacityError: The burst buffer is too small for it.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        *,
        job_dir: str,
        run_dir: str,
        info: RunInfo,
        rank: int,
        node: str,
        ranks_on_node: int,
        slots: int,
        private: Policy,
        options: LoadOptions,
        helpers: Sequence[Background],
        shard: Callable[[int], ShardManifest],
        shards: Callable[[int], Sequence[ShardManifest]],
        drained: Callable[[int], DrainedManifest],
    ) -> None:
        self._state, self._job_dir, self._run_dir, self._private = state, job_dir, run_dir, private
        self._options, self._helpers = options, helpers
        self._info, self._rank, self._node = info, rank, node
        self._shard, self._shards, self._drained = shard, shards, drained
        sets = node_sets.of_run(run_dir)

        def parities(slot_bytes: int) -> int:
            return sets.parity_bytes(ranks_on_node * slot_bytes) if sets is not None else 0

        def reserve(slot_bytes: int) -> int:
            parity = parities(slot_bytes)  # where it does not fit at all, nothing is kept free for it
            return parity if parity + LEAST_SLOTS * ranks_on_node * slot_bytes <= capacity(job_dir) else 0

        self._arena = Arena(job_dir, rank, slots=slots, reserve=reserve)
        self._memo = Memo()
        self._hooks = Hooks()
        # what cannot be stored is said before the training, not at its first checkpoint
        with garbage.kept():
            wanted = self._arena.wanted(flatten(state, meta=True))
            scheme = f"{sets.scheme} in sets of {sets.smallest} nodes" if sets is not None else ""
            short = check_capacity(
                job_dir,
                wanted,
                ranks_on_node,
                slots=slots,
                parity_bytes=parities(wanted.file_bytes),
                scheme=scheme,
            )
            if short and rank == 0:  # not once for each rank
                log.warning("slurm-resil: %s", short)

    def write(self, index: int, iteration: int) -> str:
        """Copy the state as it is now into a slot; returns the draft of its manifest, see ``format.draft``."""
        flat = flatten(self._state, self._memo)
        manifest = self._arena.write(index, flat, iteration=iteration, run=self._info, node=self._node)
        return self._arena.draft(manifest, flat)

    def start(self, index: int, iteration: int) -> Callable[[], str]:
        """Copy what may change before the next ``step()`` of an optimizer; the rest is for the call that is returned.

        Returns:
            Does the rest, in another thread, and returns the draft of the manifest. Optimizers wait for it, or help.
        """
        flat = flatten(self._state, self._memo)
        stays = self._hooks.watch(flat.optimizers)
        writing = self._arena.start(index, flat, iteration=iteration, run=self._info, node=self._node, later=stays)
        self._hooks.pending = writing.copies.release

        def finish() -> str:
            try:
                return self._arena.draft(writing.finish(), flat)
            finally:
                self._hooks.pending = None

        return finish

    def want(self) -> str:
        """Say in the burst buffer how slots should be laid out for the state as it is; returns the layout's name."""
        wanted = self._arena.wanted(flatten(self._state, self._memo))
        wanted.publish(self._job_dir)
        return wanted.digest

    def take(self, indices: tuple[int, ...]) -> None:
        """Map slots that hold nothing of worth; they are laid out unless they are already."""
        self._arena.prepare(flatten(self._state, self._memo), indices)

    def load_local(self, iteration: int) -> None:
        """Load this rank's sealed shard. Raises DataError if it is not what it claims to be."""
        with garbage.kept():  # of the manifest, too
            restore_local(self._state, self._job_dir, self._shard(iteration), self._options, self._helpers)

    def load_shards(self, iteration: int) -> None:
        """Load from the shards of all ranks that saved. Raises DataError if they are not what they claim to be."""
        restore_shards(
            self._state,
            self._job_dir,
            self._shards(iteration),
            self._rank,
            self._info.world_size,
            private=self._private,
            options=self._options,
        )

    def load_drained(self, iteration: int) -> None:
        """Load from the drained file, or its staged copy. Raises DataError if it is not what it claims to be."""
        waited_s = staged.wait(self._job_dir, iteration)
        with garbage.kept():
            manifest = self._drained(iteration)
            done = restore_drained(
                self._state,
                self._run_dir,
                manifest,
                self._rank,
                self._info.world_size,
                private=self._private,
                options=self._options,
                staged=staged.find(self._job_dir, manifest),
            )
        if done.staged_bytes or waited_s > _WORTH_TELLING_S:
            words = "slurm-resil: rank %d: %d of %d bytes came from the staged copy, waited for it %.1f s"
            log.info(words, self._rank, done.staged_bytes, done.read_bytes, waited_s)

    def close(self) -> None:
        """Leave the optimizers alone."""
        self._hooks.close()
