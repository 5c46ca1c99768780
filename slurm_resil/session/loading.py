"""Load a state without a Checkpointer: from a directory of ``async_save``, a run's directory or a drained file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slurm_resil.catalog import RunCatalog
from slurm_resil.ckpt import saved
from slurm_resil.ckpt.options import LoadOptions, listed
from slurm_resil.ckpt.planning import EXACT
from slurm_resil.ckpt.private import Policy
from slurm_resil.ckpt.ranks import Ranks
from slurm_resil.ckpt.restore import restore_drained, restore_shards
from slurm_resil.ckpt.saved import Save
from slurm_resil.core import paths
from slurm_resil.core.errors import DataError, ResilError, StateError
from slurm_resil.format.manifest import digest

WAIT_S = 1800.0  # for the other ranks
log = logging.getLogger(__name__)
_calls: dict[str, int] = {}


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A checkpoint that may be loaded.

    Attributes:
        name: File or directory name.
        iteration: Its number.
        load: Loads it.
    """

    name: str
    iteration: int
    load: Callable[[Mapping[str, object], Ranks], object]


def load(
    state: Mapping[str, object],
    path: str | os.PathLike[str],
    *,
    iteration: int | None = None,
    private: Policy = "error",
    options: LoadOptions = EXACT,
    timeout_s: float = WAIT_S,
) -> int:
    """Load a checkpoint into a state, in place.

    Names, types and shapes are compared, and all bytes that are needed are verified, before anything is changed. The
    number of ranks may be another than that of the save. A checkpoint that is damaged is passed over with a warning,
    on all ranks, and the one before it is loaded.

    Collective: every rank of the process group calls it, with the same arguments; they agree through the group's store.

    Args:
        state: As given to :func:`slurm_resil.async_save` or to a Checkpointer.
        path: Directory of ``async_save``, one save in it, a run's directory with drained checkpoints, or a drained
            file.
        iteration: Which checkpoint; default: the one saved last that can be loaded.
        private: What becomes of rank-private state when the number of ranks has changed: ``error``, ``fresh`` (it stays
            as it is) or ``rank_mod`` (rank r gets that of r modulo the old number).
        options: What may be left out or converted.
        timeout_s: Longest wait for the other ranks, seconds.

    Returns:
        Its iteration, the same on all ranks.

    Raises:
        StateError: The state does not fit; on this rank nothing was changed.
        DataError: There is no checkpoint, or none that is whole.
        ServiceError: Another rank was not heard in time.
    """
    path = os.path.abspath(path)
    ranks = Ranks()
    number = _calls[path] = _calls.get(path, 0) + 1
    key = f"load/{digest(path.encode('utf-8', 'surrogateescape'))}/{number}"
    there = {one.name: one for one in _candidates(path, iteration, private, options)}
    names = [name for name in ranks.claim(key, "\n".join(there) or "\n").split("\n") if name]
    if not names:
        raise _nothing(path, iteration)
    bad: list[str] = []
    for name in names:
        error = _attempt(there.get(name), name, state, ranks)
        words = ranks.tell(f"{key}/{name}", _word(error), timeout_s=timeout_s)
        if isinstance(error, StateError):
            raise error
        unfit = [f"rank {rank}: {word[6:]}" for rank, word in enumerate(words) if word.startswith("unfit ")]
        if unfit:
            raise StateError(f"{path}/{name} does not fit on another rank: {listed(unfit, '; ')}", rank=ranks.rank)
        faults = [f"rank {rank}: {word}" for rank, word in enumerate(words) if word]
        if not faults:
            return there[name].iteration
        bad.append(f"{name}: {listed(faults, '; ')}")
        log.warning("slurm-resil: rank %d: checkpoint %s is bad: %s", ranks.rank, name, listed(faults, "; "))
    raise DataError(f"no checkpoint in {path} can be loaded: {listed(bad, '; ')}", rank=ranks.rank)


def _attempt(candidate: _Candidate | None, name: str, state: Mapping[str, object], ranks: Ranks) -> ResilError | None:
    """Load a candidate; returns what is wrong with it."""
    if candidate is None:
        return DataError(f"{name} is not to be seen on this node", fault="missing")
    try:
        candidate.load(state, ranks)
    except ResilError as error:
        return error
    except OSError as error:
        return DataError(f"{name} cannot be read: {error}", fault="unreadable")
    return None


def _word(error: ResilError | None) -> str:
    if error is None:
        return ""
    return f"unfit {error}" if isinstance(error, StateError) else str(error)


def _candidates(path: str, iteration: int | None, private: Policy, options: LoadOptions) -> list[_Candidate]:
    """What may be loaded, the newest first.

    Raises:
        DataError: There are checkpoints of torch.distributed.checkpoint alone.
    """
    root, name = os.path.split(path)
    if name.endswith(".h5"):
        number = paths.parse_drained(name.removesuffix(".h5") + ".json")
        return [] if number is None else [_drained(root, number, private, options)]
    itself = [save for save in saved.found(root) if save.name == name] if os.path.isdir(root) else []
    saves = itself or (saved.found(path) if os.path.isdir(path) else [])
    found = [
        _saved(save, private, options)
        for save in saves
        if save.kind == "save" and iteration in (None, save.iteration) and save.complete
    ]
    durable = RunCatalog(path).durable() if os.path.isdir(path) else []
    found += [_drained(path, one, private, options) for one in durable if iteration in (None, one)]
    if not found and any(save.kind == "dcp" and save.complete for save in saves):
        raise DataError(
            f"{path} was saved by torch.distributed.checkpoint",
            mend="load it with dcp.load(..., storage_reader=slurm_resil.dcp.Reader(path))",
        )
    return found


def _saved(save: Save, private: Policy, options: LoadOptions) -> _Candidate:
    def load_it(state: Mapping[str, object], ranks: Ranks) -> object:
        manifests = save.manifests()
        return restore_shards(
            state, save.path, manifests, ranks.rank, ranks.world_size, private=private, options=options
        )

    return _Candidate(name=save.name, iteration=save.iteration, load=load_it)


def _drained(run_dir: str, iteration: int, private: Policy, options: LoadOptions) -> _Candidate:
    def load_it(state: Mapping[str, object], ranks: Ranks) -> object:
        manifest = RunCatalog(run_dir).load(iteration)
        return restore_drained(state, run_dir, manifest, ranks.rank, ranks.world_size, private=private, options=options)

    name = os.path.basename(paths.drained(run_dir, iteration))
    return _Candidate(name=name, iteration=iteration, load=load_it)


def _nothing(path: str, iteration: int | None) -> DataError:
    what = "complete checkpoint" if iteration is None else f"complete checkpoint of iteration {iteration}"
    return DataError(f"{path} has no {what}", mend="give the directory that was saved to", fault="missing")
