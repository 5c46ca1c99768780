"""Sealed shards on several "nodes" (directories), made without torch, and what the drained file must hold."""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from slurm_resil.comm import local
from slurm_resil.core import paths
from slurm_resil.core.model import RunInfo
from slurm_resil.drain import collective
from slurm_resil.drain.skeleton import dataset, skeleton
from slurm_resil.format import container, frame, stamp
from slurm_resil.format.manifest import DrainedManifest, Extent, Item, ShardManifest, digest

RUN = "run-7"
ITERATION = 40


@dataclass
class Local:
    """One item of one rank: its data, and how it is shared."""

    data: np.ndarray
    sharing: str = "plain"
    global_shape: tuple[int, ...] = ()
    extents: tuple[Extent, ...] = ()


@dataclass
class World:
    """Ranks, nodes, and where everything lies."""

    root: Path
    ranks: int
    per_node: int
    states: list[dict[str, Local]] = field(default_factory=list)
    expected: dict[str, np.ndarray] = field(default_factory=dict)  # by dataset name
    job_dirs: list[str] = field(default_factory=list)  # of the nodes; below root if empty

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)

    @property
    def run_dir(self) -> str:
        return str(self.root / "pfs" / RUN)

    def job_dir(self, node: int) -> str:
        return self.job_dirs[node] if self.job_dirs else str(self.root / f"node{node}" / "job-9")

    def seal(self, iteration: int = ITERATION, *, slot: int = 0, attempt: int = 0) -> None:
        """Write slots and manifests of all ranks."""
        os.makedirs(self.run_dir, exist_ok=True)
        for rank, state in enumerate(self.states):
            self.seal_rank(rank, state, iteration, slot, attempt)

    def seal_rank(self, rank: int, state: dict[str, Local], iteration: int, slot: int, attempt: int = 0) -> None:
        job_dir = self.job_dir(rank // self.per_node)
        for name in ("slots", "manifests"):
            os.makedirs(f"{job_dir}/{name}", exist_ok=True)
        path = paths.slot(job_dir, rank, slot)
        Path(path).unlink(missing_ok=True)
        specs = [
            container.Spec(path=f"/state/{name}", dtype=f"numpy.{one.data.dtype.str}", shape=one.data.shape)
            for name, one in state.items()
        ]
        made = container.create_skeleton(path, specs, user_block_bytes=container.USER_BLOCK_BYTES)
        items = []
        with open(path, "r+b") as file:
            for offset, (name, one) in zip(made.offsets, state.items(), strict=True):
                raw = np.ascontiguousarray(one.data).tobytes()
                items.append(
                    Item(
                        name=name,
                        dtype=f"numpy.{one.data.dtype.str}",
                        shape=one.data.shape,
                        offset=offset,
                        nbytes=len(raw),
                        sharing=one.sharing,
                        global_shape=one.global_shape or one.data.shape,
                        extents=one.extents,
                        xxh3=digest(raw),
                    )
                )
                file.seek(offset or 0)
                file.write(raw)
        manifest = ShardManifest(
            run_id=RUN,
            job_id=9,
            attempt=attempt,
            iteration=iteration,
            rank=rank,
            world_size=self.ranks,
            node=f"node{rank // self.per_node}",
            slot=os.path.basename(path),
            generation=1,
            items=tuple(items),
            values={"lr": 0.5, "rank": rank, "iteration": iteration},
        )
        run = RunInfo(run_id=RUN, job_id=9, attempt=attempt, cycle=0, world_size=self.ranks, nodes=1)
        with open(path, "r+b") as file:
            with mmap.mmap(file.fileno(), 0) as slot_map:
                mark = stamp.make(run, generation=1, iteration=iteration, rank=rank)
                stamp.begin(slot_map, mark)
                stamp.end(slot_map, mark)
                outer = frame.digest(lambda start, stop: slot_map[start:stop], frame.spans(items), len(slot_map))
        replace(manifest, frame=outer).publish(paths.manifest(job_dir, iteration, rank), sync=False)

    def manifest(self, rank: int, iteration: int = ITERATION) -> ShardManifest:
        return ShardManifest.load(paths.manifest(self.job_dir(rank // self.per_node), iteration, rank))

    def edit(self, rank: int, iteration: int = ITERATION, **changes: object) -> None:
        """Publish a changed manifest of a rank."""
        changed = replace(self.manifest(rank, iteration), **changes)
        changed.publish(paths.manifest(self.job_dir(rank // self.per_node), iteration, rank), sync=False)

    def slot(self, rank: int) -> str:
        return paths.slot(self.job_dir(rank // self.per_node), rank, 0)

    def flip(self, rank: int, name: str, at: int = 3) -> None:
        """Flip a bit of an item in its slot."""
        item = next(i for i in self.manifest(rank).items if i.name == name)
        with open(self.slot(rank), "r+b") as file:
            file.seek(item.offset + at)
            byte = file.read(1)[0]
            file.seek(item.offset + at)
            file.write(bytes([byte ^ 4]))

    def drain(self, *, iteration: int | None = ITERATION, movers: int | None = None, **options):
        """Drain with threads as movers; returns rank 0's outcome."""
        stop = options.pop("stop", lambda: False)
        progress = options.pop("progress", lambda _: None)
        options.setdefault("lease_stale_s", 0.5)
        options.setdefault("retry_s", 0.0)
        tell = options.pop("tell", lambda _name, _fields: None)
        heed = options.pop("heed", lambda _: None)

        def one(comm):
            return collective.drain(
                comm,
                run_dir=self.run_dir,
                job_dir=self.job_dir(comm.rank),
                iteration=iteration,
                skeleton=skeleton,
                options=collective.Options(**options),
                stop=stop,
                progress=progress,
                tell=tell,
                heed=heed,
            )

        outcomes = local.run(movers or self.nodes, one)
        assert all(outcome.manifest == outcomes[0].manifest for outcome in outcomes)
        return outcomes[0]

    def check(self, iteration: int = ITERATION) -> DrainedManifest:
        """Read the drained file with plain h5py, and everything that the manifest says about it."""
        manifest = DrainedManifest.load(paths.drained_manifest(self.run_dir, iteration))
        path = os.path.join(self.run_dir, manifest.file)
        raw = Path(path).read_bytes()
        assert len(raw) == manifest.file_bytes
        step = manifest.block_bytes
        assert manifest.blocks == tuple(digest(raw[at : at + step]) for at in range(0, len(raw), step))
        names = {dataset(item.name, item.rank) for item in manifest.items}
        values = {f"ranks/{rank}/values" for rank in range(self.ranks)}
        assert names == set(self.expected) | values
        with h5py.File(path, "r") as file:
            for name, tensor in self.expected.items():
                stored = file[name][()]
                assert stored.dtype == tensor.dtype and stored.shape == tensor.shape, name
                assert stored.tobytes() == tensor.tobytes(), name
            for rank in range(self.ranks):
                text = file[f"ranks/{rank}/values"][()].tobytes().decode()
                assert text == f'{{"iteration":{iteration},"lr":0.5,"rank":{rank}}}'
        for item in manifest.items:
            if item.offset is not None:
                name = dataset(item.name, item.rank)
                if name in self.expected:
                    assert raw[item.offset : item.offset + item.nbytes] == self.expected[name].tobytes()
        assert sum(manifest.written_bytes) == sum(item.nbytes for item in manifest.items)
        assert self.leftovers() == []
        return manifest

    def leftovers(self) -> list[str]:
        return [name for name in os.listdir(self.run_dir) if name.startswith(".")]

    def published(self) -> list[str]:
        return sorted(name for name in os.listdir(self.run_dir) if name.endswith((".json", ".h5")))


def tile(tensor: np.ndarray, splits: list[list[tuple[int, int]]]) -> list[Local]:
    """Cut a tensor into a grid; ``splits`` has (start, size) for each dimension. Row-major order of the grid."""
    parts = []
    for cell in itertools.product(*splits):
        start, shape = tuple(c[0] for c in cell), tuple(c[1] for c in cell)
        data = tensor[tuple(slice(a, a + n) for a, n in cell)]
        extent = Extent(local=(0,) * tensor.ndim, start=start, shape=shape)
        extents = (extent,) if data.size else ()
        parts.append(Local(np.ascontiguousarray(data), "sharded", tensor.shape, extents))
    return parts


def spans(size: int, parts: int) -> list[tuple[int, int]]:
    """Uneven split as FSDP does it: chunks of ceil(size / parts), the last ones short or empty."""
    step = -(-size // parts)
    return [(min(i * step, size), max(0, min(size, (i + 1) * step) - min(i * step, size))) for i in range(parts)]


def build(root: Path, *, ranks: int = 4, per_node: int = 1, seed: int = 0, scale: int = 1) -> World:
    """A world with every kind of item; ``scale`` multiplies the rows of the large ones."""
    rng = np.random.default_rng(seed)
    world = World(root=root, ranks=ranks, per_node=per_node, states=[{} for _ in range(ranks)])

    def put(name: str, parts: list[Local], whole: np.ndarray | None = None) -> None:
        for state, part in zip(world.states, parts, strict=True):
            state[name] = part
        if whole is not None:
            world.expected[f"state/{name}"] = whole

    def random(*shape: int, dtype: str = "float32") -> np.ndarray:
        return (
            np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), np.uint8)
            .view(dtype)
            .reshape(shape)
        )

    rows = random(30 * scale, 17)
    put("model/rows", tile(rows, [spans(30 * scale, ranks), [(0, 17)]]), rows)
    columns = random(12 * scale, 29, dtype="int16")
    put("model/columns", tile(columns, [[(0, 12 * scale)], spans(29, ranks)]), columns)
    few = random(2, 5)
    put("model/few", tile(few, [spans(2, ranks), [(0, 5)]]), few)  # some ranks hold nothing
    cube = random(6, 4 * ranks, 3, dtype="float64")
    put("model/cube", tile(cube, [[(0, 6)], spans(4 * ranks, ranks), [(0, 3)]]), cube)
    strided = random(8 * ranks, 6)
    put("model/strided", [_strided(strided, rank, ranks) for rank in range(ranks)], strided)
    same = random(40 * scale, 31)
    put("model/same", [Local(same)] * ranks, same)
    scalar = np.array(7.25)
    put("optim/scalar", [Local(scalar)] * ranks, scalar)
    empty = np.empty((0, 4), np.float32)
    put("model/empty", [Local(empty)] * ranks, empty)
    halves = random(10 * scale, 9)  # replicated over pairs of ranks, as in HSDP
    half = tile(halves, [spans(10 * scale, max(1, ranks // 2)), [(0, 9)]])
    put("model/hsdp", [half[rank % len(half)] for rank in range(ranks)], halves)
    for rank in range(ranks):
        for name, sharing in (("model/differs", "plain"), ("rng/cpu", "private")):
            data = random(11, dtype="uint8") if sharing == "private" else random(5)
            world.states[rank][name] = Local(data, sharing)
            once = ranks == 1 and sharing == "plain"  # nobody to differ from
            world.expected[f"state/{name}" if once else f"ranks/{rank}/{name}"] = data
        data = np.arange(4)
        world.states[rank]["loader/position"] = Local(data, "private")  # equal, but private all the same
        world.expected[f"ranks/{rank}/loader/position"] = data
    return world


def _strided(tensor: np.ndarray, rank: int, ranks: int) -> Local:
    """Every ranks-th block of two rows: the local tensor is several pieces of the global one."""
    starts = range(2 * rank, len(tensor), 2 * ranks)
    data = np.concatenate([tensor[at : at + 2] for at in starts])
    extents = tuple(Extent(local=(2 * i, 0), start=(at, 0), shape=(2, tensor.shape[1])) for i, at in enumerate(starts))
    return Local(data, "sharded", tensor.shape, extents)


def mpiexec() -> str:
    """Program that starts movers without Slurm."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("no mpiexec")
    return found
