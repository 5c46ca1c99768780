"""Train a small GPT on the sources of Python's standard library, which every machine has.

What makes it survive is the three lines with ``Checkpointer``; everything else is an ordinary training script for one
process, for ``torchrun`` and for Slurm alike. It is deterministic bit for bit, restarts included, so that a run that
was hit by faults can be compared with one that was not: ``--digest FILE`` writes hashes of each rank's whole state.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import sysconfig
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns about find_unused_parameters, which is wanted below

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812 -- the name that everybody knows
from torch.nn.parallel import DistributedDataParallel

import slurm_resil as sr

VOCABULARY = 256  # bytes
CONTEXT = 64  # bytes of a sample
SIZES = {"tiny": (64, 2, 2), "small": (256, 4, 4), "base": (512, 8, 8)}  # width, layers, heads
TEXT_BYTES = 4 << 20


def standard_library() -> torch.Tensor:
    """Read the text: the modules of the standard library, by name, as one array of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\0".join(file.read_bytes() for file in files)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Block(nn.Module):
    """One layer: causal attention, then a perceptron, each beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, context, width) to the same shape."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Predict the next byte. The batch norm is there for its running statistics, which are another on every rank."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.input_norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map byte values (batch, context) to logits (batch, context, 256)."""
        x = self.token(tokens) + self.place.weight
        x = self.input_norm(x.flatten(0, 1)).view_as(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Loader:
    """Walks through the text in random strides; its place and its generator are this rank's own."""

    def __init__(self, text: torch.Tensor, batch: int, seed: int, rank: int) -> None:
        self.text, self.batch = text, batch
        self.generator = torch.Generator().manual_seed(seed * 100_003 + rank)
        self.position = rank * 9973

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, both (batch, context), int64."""
        strides = torch.randint(CONTEXT, 50 * CONTEXT, (self.batch,), generator=self.generator)
        starts = (self.position + strides.cumsum(0)) % (len(self.text) - CONTEXT - 1)
        self.position = int(starts[-1])
        window = self.text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        return window[:, :-1], window[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next sample depends on."""
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where the state was taken."""
        self.position = state["position"]
        self.generator.set_state(state["generator"])


class Randomness:
    """The global random generators of this process: dropout draws from PyTorch's."""

    def state_dict(self) -> dict[str, Any]:
        """Take the generators' states."""
        version, words, gauss = random.getstate()
        return {"torch": torch.get_rng_state(), "python": [version, list(words), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the generators back."""
        torch.set_rng_state(state["torch"])
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))


def digests(state: dict[str, Any]) -> dict[str, str]:
    """Hash every tensor and value of this rank's state, with no help from the library that is under test."""
    found = {}

    def walk(name: str, value: Any) -> None:
        if hasattr(value, "state_dict"):
            walk(name, value.state_dict())
        elif isinstance(value, dict):
            for key, entry in value.items():
                walk(f"{name}.{key}", entry)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            data = local.detach().contiguous().flatten().view(torch.uint8).numpy()
            found[name] = hashlib.sha256(f"{local.dtype} {tuple(local.shape)} ".encode() + data.tobytes()).hexdigest()
        else:
            found[name] = hashlib.sha256(repr(value).encode()).hexdigest()

    for name, value in state.items():
        walk(name, value)
    return found


def write_digest(path: str, state: dict[str, Any], iteration: int, rank: int) -> None:
    """Write this rank's digests beside those of the other ranks: ``<path>.<rank>``."""
    parts = digests(state)
    whole = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report = {"iteration": iteration, "rank": rank, "digest": whole, "parts": parts, "peak_rss_bytes": peak}
    Path(f"{path}.{rank}").write_text(json.dumps(report, indent=1) + "\n")


def wrap(model: nn.Module, *, fsdp2: bool) -> nn.Module:
    """Make the model data-parallel."""
    if fsdp2:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    # Gradients are summed bucket by bucket. DDP rearranges its buckets after the first iteration, which changes the
    # order of the sum, and so the last bits, of one iteration after every restart; looking for unused parameters keeps
    # the arrangement. Buffers stay each rank's own.
    return DistributedDataParallel(model, find_unused_parameters=True, forward_sync_buffers=False)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="samples of each rank and iteration")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model-size", choices=SIZES, default="small")
    parser.add_argument("--fsdp2", action="store_true", help="shard parameters and optimizer (fully_shard)")
    parser.add_argument("--digest", metavar="FILE", help="at the end write this rank's hashes to FILE.<rank>")
    parser.add_argument("--pace", type=float, default=0.0, help="shortest time of an iteration, seconds, to watch it")
    parser.add_argument("--plain", action="store_true", help="train without any checkpointing, to compare with")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train."""
    options = arguments(argv)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    alone: dict[str, Any] = (
        {} if "MASTER_ADDR" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    )
    dist.init_process_group("gloo", **alone)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)  # the same parameters on every rank
    model = GPT(*SIZES[options.model_size])
    parallel = wrap(model, fsdp2=options.fsdp2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.iterations)
    loader = Loader(standard_library(), options.batch, options.seed, rank)
    torch.manual_seed(options.seed * 1009 + rank)  # other dropout on every rank
    random.seed(options.seed * 1013 + rank)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "loader": loader,
        "randomness": Randomness(),
    }

    def iteration(number: int) -> None:
        started = time.perf_counter()
        inputs, targets = loader.next()
        loss = F.cross_entropy(parallel(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        took = time.perf_counter() - started
        time.sleep(max(0.0, options.pace - took))
        if rank == 0:
            print(f"iteration {number + 1} loss {loss.item():.6f} seconds {took:.3f}", flush=True)

    if options.plain:
        for number in range(options.iterations):
            iteration(number)
    else:
        with sr.Checkpointer.from_env(state) as checkpointer:
            start = checkpointer.restore()
            if rank == 0:
                print(f"starting at iteration {start} with {world} ranks", flush=True)
            for number in range(start, options.iterations):
                iteration(number)
                if checkpointer.step(number + 1):  # safe, and asked to stop
                    if rank == 0:
                        print(f"stopping at iteration {number + 1}", flush=True)
                    return
    if options.digest:
        write_digest(options.digest, state, options.iterations, rank)
    if rank == 0:
        print(f"finished {options.iterations} iterations", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
