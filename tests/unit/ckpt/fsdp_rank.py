"""One rank of an FSDP2 training that saves and restores; started by test_sharding.

Usage: fsdp_rank.py RANK WORLD DIRECTORY VERB:STYLE:WHERE...
Styles: ``fsdp``, ``hsdp`` (two replicas), ``tp`` (FSDP2 over tensor parallelism of 2), ``tp-only``, ``ddp``; with
``+meta`` the model is built on the meta device, with ``+reversed`` the optimizer has its parameters the other way
round. WHERE is a directory that
holds a burst buffer and a run. Verbs: ``save``, ``local`` (restore), ``drain``, ``drained`` (restore),
``shards`` (restore from those of all ranks). After each this
rank's hashes are written to ``DIRECTORY/<index>-<rank>.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ckptworld as w
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from slurm_resil.ckpt.state import Sharded
from slurm_resil.format.manifest import Extent

ROWS = 11  # of a tensor that is given as Sharded


class Model(nn.Module):
    """Uneven rows (30 over 4, 7 over 2), tied weights, fewer rows than ranks, statistics of its own on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(30, 7)
        self.up = nn.Linear(7, 14)
        self.down = nn.Linear(14, 7)
        self.small = nn.Linear(7, 2)
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.down(torch.relu(self.up(self.token(x)))))
        return hidden.sum() + self.small(hidden).pow(2).sum()


class Average:
    """A moving average of a model: distributed tensors in an object that is handed its state."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name] = self.values[name] * 0.9 + parameter.detach() * 0.1

    def state_dict(self) -> dict:
        return {"values": self.values}

    def load_state_dict(self, state: dict) -> None:
        self.values = state["values"]


def build(seed: int, rank: int, world: int, style: str) -> dict:
    style, _, twist = style.partition("+")
    torch.manual_seed(seed)
    with torch.device("meta" if twist == "meta" else "cpu"):
        model: nn.Module = Model()
    mesh = dist.init_device_mesh("cpu", (world,))
    own = rank
    if style == "hsdp":
        mesh = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))
    elif style == "tp":
        both = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh, own = both["dp"], rank // 2
    elif style == "tp-only":
        up = ColwiseParallel(use_local_output=False)  # uneven parts have no shape of their own
        parallelize_module(model, mesh, {"up": up, "down": RowwiseParallel()})
        own = 0
    if style in ("fsdp", "hsdp", "tp"):
        for part in (model.up, model.down):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[::-1] if twist == "reversed" else parameters, lr=0.05)
    average = Average(model)
    if style == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(100 * seed + own)
    table = rows(torch.full((ROWS, 3), float(seed)), rank, world)
    return {"model": model, "optimizer": optimizer, "average": average, "generator": generator, "table": table}


def rows(whole: torch.Tensor, rank: int, world: int) -> Sharded:
    """A rank's part of a tensor that says itself what it is: every ``world``-th row, in pieces of one."""
    mine = range(rank, ROWS, world)
    extents = tuple(Extent(local=(at, 0), start=(row, 0), shape=(1, 3)) for at, row in enumerate(mine))
    return Sharded(tensor=whole[rank::world].clone(), global_shape=tuple(whole.shape), extents=extents)


def bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def train(state: dict, count: int) -> None:
    for _ in range(count):
        x = torch.randint(30, (8,), generator=state["generator"])
        state["optimizer"].zero_grad()
        state["model"](x).backward()
        state["optimizer"].step()
        state["average"].update(bare(state["model"]))
        table = state["table"]
        for extent in table.extents:
            table.tensor[extent.local[0]] += extent.start[0] + torch.tensor([0.25, 0.5, 0.75])


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + raw).hexdigest()


def hashes(state: dict) -> dict[str, dict[str, str]]:
    """Hash local parts and, gathered by torch itself, whole tensors."""
    found: dict[str, dict[str, str]] = {"local": {}, "full": {}, "plain": {}, "placed": {}}
    model = bare(state["model"])
    entries = {**model.state_dict(), **{f"average.{name}": p for name, p in state["average"].values.items()}}
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, values in state["optimizer"].state.items():
        entries.update({f"{names[id(parameter)]}.{key}": value for key, value in values.items()})
    for name, value in entries.items():
        if isinstance(value, DTensor):
            found["local"][name] = digest(value.to_local())
            found["full"][name] = digest(value.full_tensor())
            found["placed"][name] = str(value.placements)
        else:
            found["plain"][name] = digest(value)
    whole, gathered = torch.empty(ROWS, 3), [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (state["table"].tensor, [extent.start[0] for extent in state["table"].extents]))
    for part, places in gathered:
        whole[places] = part
    found["full"]["table"] = digest(whole)
    found["plain"]["generator"] = digest(state["generator"].get_state())
    return found


def act(verb: str, style: str, where: Path, rank: int, world: int, index: int) -> dict:
    """Do one thing; returns what is to be compared."""
    job, run = w.job(where), str(where / "r1")
    if verb == "drain":
        if rank == 0:
            w.drain(job, run)
        return {}
    state = build(1 if verb == "save" else 2, rank, world, style)
    report: dict = {}
    if style == "ddp" and verb != "save":
        train(state, 1)  # from the second iteration on the buckets of its reduction are others, and so the sums
    if verb == "save":
        train(state, 2)
        w.save_new(job, state, rank=rank, world_size=world)
    elif verb == "local":
        train(state, 0 if "meta" in style else index % 2)  # with and without state of the optimizer
        w.load(job, state, rank=rank)
    else:
        load, place = (w.load_drained, run) if verb == "drained" else (w.load_shards, job)
        restored = load(place, state, rank, world, private="rank_mod")
        report = {"wanted": restored.wanted_bytes, "read": restored.read_bytes}
    report["at"] = hashes(state)
    train(state, 2)
    report["later"] = hashes(state)
    return report


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world)
    for index, action in enumerate(sys.argv[4:]):
        verb, style, where = action.split(":")
        report = act(verb, style, Path(where), rank, world, index)
        Path(directory, f"{index}-{rank}.json").write_text(json.dumps(report))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
    os._exit(0)  # all is reported; threads of groups that torch made for meshes abort a process that ends in order
