"""One rank of a training that saves and loads with torch.distributed.checkpoint; started by test_dcp_ranks.

Usage: dcp_rank.py RANK WORLD DIRECTORY VERB:STYLE:WHERE... Styles are those of fsdp_rank. Verbs: ``save``, ``thread``
and ``process`` (async_save), ``load``, ``caching`` (two saves with a cached plan, the second after more training),
``fails`` (rank 1 has something that cannot be stored), ``full`` (rank 1 finds its storage full), ``strided`` (a part of
several boxes, which torch's plans take for one).
After each this rank's hashes are written to ``DIRECTORY/<index>-<rank>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ckpt"))

import fsdp_rank as f
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

import slurm_resil as sr
from slurm_resil.core import faults


def hashes(state):
    """Hashes of what the program saves: a table that says what it is belongs to ours alone."""
    found = f.hashes(state)
    del found["full"]["table"]
    return found


class AppState(Stateful):
    """As in PyTorch's tutorial."""

    def __init__(self, model, optimizer=None):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def attempt(save) -> str:
    """What a save fails with, as text."""
    try:
        save()
    except CheckpointException as error:
        return str(error)
    return ""


def strided(where: str, rank: int, world: int) -> dict:
    """Load a tensor into parts that are no box, and try to save them."""
    whole = {"x": torch.arange(30.0)}
    dcp.save(whole, storage_writer=sr.dcp.Writer(where))
    placement = _StridedShard(0, split_factor=2)
    want = placement._split_tensor(whole["x"], world, with_padding=False)[0][rank]
    mesh = dist.init_device_mesh("cpu", (world,))
    part = DTensor.from_local(torch.zeros_like(want), mesh, [placement], run_check=False, shape=(30,), stride=(1,))
    dcp.load({"x": part}, storage_reader=sr.dcp.Reader(where))
    error = attempt(lambda: dcp.save({"x": part}, storage_writer=sr.dcp.Writer(where)))
    return {"right": torch.equal(part.to_local(), want), "error": error}


def act(verb: str, style: str, where: str, rank: int, world: int) -> dict:
    if verb == "strided":
        return strided(where, rank, world)
    state = f.build(2 if verb == "load" else 1, rank, world, style)
    app = {"app": AppState(state["model"], state["optimizer"]), "average": state["average"]}
    app["epoch"] = 7 if verb != "load" else 0
    writer = sr.dcp.Writer(where)
    report: dict = {}
    if verb == "load":
        f.train(state, 1)  # other numbers, which must all go
        dcp.load(app, storage_reader=sr.dcp.Reader(where))
        report["epoch"] = app["epoch"]
    else:
        f.train(state, 2)
    if verb == "save":
        dcp.save(app, storage_writer=writer)
    elif verb in ("thread", "process"):
        kind = AsyncCheckpointerType.THREAD if verb == "thread" else AsyncCheckpointerType.PROCESS
        group = dist.new_group()  # torch's own collectives of the save must not mix with those of the training
        future = dcp.async_save(app, storage_writer=writer, async_checkpointer_type=kind, process_group=group)
        report["at"] = hashes(state)
        f.train(state, 1)  # what was saved is the state at the call
        future.result(timeout=120)
    elif verb == "caching":
        dcp.save(app, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
        f.train(state, 2)
        dcp.save(app, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
    elif verb == "fails":
        app[f"odd-{rank}"] = object() if rank == 1 else 3
        report["error"] = attempt(lambda: dcp.save(app, storage_writer=writer))
    elif verb == "full":
        faults.load("saved.write:raise@2" if rank == 1 else "")
        report["error"] = attempt(lambda: dcp.save(app, storage_writer=writer))
        faults.load("")
    if "at" not in report:
        report["at"] = hashes(state)
    return report


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world)
    for index, action in enumerate(sys.argv[4:]):
        report = act(*action.split(":"), rank, world)
        Path(directory, f"{index}-{rank}.json").write_text(json.dumps(report))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    main()
