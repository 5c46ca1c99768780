"""A burst buffer and a training state without torch: a slot is a file of bytes, the state one array. For fault tests.

Everything else is the real thing: agents, leader and ranks are processes, `python raw.py agent|rank|leader JSON`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_resil.agent.agent import main_agent
from slurm_resil.agent.leader import Leader
from slurm_resil.agent.place import Place
from slurm_resil.agent.setup import AgentConfig
from slurm_resil.comm.auth import KeyAuth
from slurm_resil.core import control, faults, log, paths
from slurm_resil.core.errors import DataError
from slurm_resil.core.model import Notice, NoticeKind, RunInfo
from slurm_resil.format import draft
from slurm_resil.format.manifest import Item, ShardManifest, digest
from slurm_resil.session import Checkpointer

STATE_BYTES = 64 << 10


class RawStore:
    """The agent's side."""

    def __init__(self, job_dir: str, node_rank: int = 0) -> None:
        self.job_dir = job_dir

    def sealed(self) -> dict[int, dict[int, str]]:
        found: dict[int, dict[int, str]] = {}
        for name in os.listdir(os.path.join(self.job_dir, "manifests")):
            parsed = paths.parse_manifest(name)
            if parsed:
                found.setdefault(parsed[0], {})[parsed[1]] = os.path.join(self.job_dir, "manifests", name)
        return found

    def seal(self, draft: ShardManifest) -> ShardManifest:
        faults.point("store.seal")
        data = Path(self.job_dir, "slots", draft.slot).read_bytes()
        if len(data) != draft.nbytes:
            raise DataError(f"{draft.slot} has {len(data)} bytes, not {draft.nbytes}")
        item = draft.items[0]
        raw = {**vars(draft), "items": (Item(**{**vars(item), "xxh3": digest(data)}),)}
        manifest = ShardManifest(**raw)
        manifest.publish(paths.manifest(self.job_dir, draft.iteration, draft.rank), sync=False)
        faults.point("store.published")
        return manifest

    def prepare(self, rank: int, index: int, slots: int, layout: str) -> bool:
        return True

    def quarantine(self, iteration: int, rank: int, reason: str) -> str | None:
        source = paths.manifest(self.job_dir, iteration, rank)
        target = os.path.join(self.job_dir, "lost", os.path.basename(source))
        os.replace(source, target)
        return target

    def encoded(self) -> set[int]:
        return set()

    def forget(self, iteration: int) -> None:
        return


class RawState:
    """The rank's side: bytes that follow from the iteration and the bytes before."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.data = bytes(STATE_BYTES)
        self.loaded: list[tuple[str, int]] = []
        self.written = 0

    def store(self, *_: object) -> Any:
        """What a Checkpointer makes of it."""
        return self

    def train(self, iteration: int) -> None:
        block = hashlib.blake2b(bytes(self.data) + f"{iteration} {self.place.rank}".encode()).digest()
        self.data = block * (STATE_BYTES // len(block))

    def write(self, index: int, iteration: int) -> str:
        place = self.place
        name = f"{place.rank}-{index}.h5"
        faults.point("rank.write")
        Path(place.job_dir, "slots", name).write_bytes(self.data)
        item = Item(name="data", dtype="numpy.uint8", shape=(STATE_BYTES,), offset=0, nbytes=STATE_BYTES)
        manifest = ShardManifest(
            run_id=place.info.run_id,
            job_id=place.info.job_id,
            attempt=place.info.attempt,
            iteration=iteration,
            rank=place.rank,
            world_size=place.info.world_size,
            node=place.node,
            slot=name,
            generation=iteration,
            items=(item,),
            values={},
            costs_s={"copy": 0.001},
        )
        description = draft.describe(place.job_dir, name, manifest.items, ())
        self.written = iteration
        return draft.to_wire(manifest, description, ())

    def start(self, index: int, iteration: int) -> Callable[[], str]:
        raise NotImplementedError("one array is copied at once: these programs save eagerly only")

    def want(self) -> str:
        return "raw"

    def take(self, indices: tuple[int, ...]) -> None:
        pass

    def close(self) -> None:
        pass

    def load_local(self, iteration: int) -> None:
        place = self.place
        manifest = ShardManifest.load(paths.manifest(place.job_dir, iteration, place.rank))
        data = Path(place.job_dir, "slots", manifest.slot).read_bytes()
        self.loaded.append(("local", iteration))
        self._check(data, manifest.items[0].xxh3)

    def load_shards(self, iteration: int) -> None:
        raise NotImplementedError("as many ranks as have saved start again in these programs")

    def load_drained(self, iteration: int) -> None:
        raw = json.loads(Path(paths.drained_manifest(self.place.run_dir, iteration)).read_text())
        self.loaded.append(("drained", iteration))
        self._check(Path(raw["files"][self.place.rank]).read_bytes(), raw["xxh3"][self.place.rank])

    def _check(self, data: bytes, expected: str) -> None:
        if digest(data) != expected:
            raise DataError("the bytes do not match their hash")
        self.data = data


class RealState(RawState):
    """The same bytes as an array in real slots."""

    def __init__(self, place: Place) -> None:
        import numpy as np

        super().__init__(place)
        self.data: Any = np.zeros(STATE_BYTES, np.uint8)

    def store(self, *said: Any) -> Any:
        from slurm_resil.session.store import slot_store

        made = slot_store(self.place, {"data": self.data}, *said)
        for tier in ("local", "drained"):
            setattr(made, f"load_{tier}", functools.partial(self._load, tier, getattr(made, f"load_{tier}")))
        return made

    def _load(self, tier: str, load: Callable[[int], None], iteration: int) -> None:
        self.loaded.append((tier, iteration))
        load(iteration)

    def train(self, iteration: int) -> None:
        before = self.data
        self.data = before.tobytes()
        super().train(iteration)
        before[:] = bytearray(self.data)
        self.data = before


def agent(raw: dict[str, Any]) -> int:
    config = AgentConfig(**{**raw, "info": RunInfo(**raw["info"]), "nodes": tuple(raw["nodes"])})
    return main_agent(config, RawStore(config.job_dir))


def rank(raw: dict[str, Any]) -> int:
    """Train: `iterations`, `pace_s`, `every`; writes `starts`, `ends` and what was saved when, one JSON line each."""
    place = Place(**{**raw["place"], "info": RunInfo(**raw["place"]["info"])})
    state = RawState(place)

    def say(**fields: object) -> None:
        print(json.dumps({"rank": place.rank, **fields}), flush=True)

    with Checkpointer(place, lambda *_: state, every=raw.get("every")) as checkpointer:
        start = checkpointer.restore(timeout_s=raw.get("timeout_s", 60))
        say(start=start, loaded=state.loaded, digest=digest(state.data))
        page = control.ControlPage.open(paths.control(place.job_dir))
        # the collective that keeps data-parallel ranks together: nobody is two iterations ahead of the others here
        others = [page.block(local) + control.ITERATION for local in range(page.ranks)]
        for number in range(start + 1, raw["iterations"] + 1):
            state.train(number)
            limit = time.monotonic() + 60
            while min(page.words[other] for other in others) not in (0, *range(max(0, number - 1), number + 2)):
                if time.monotonic() > limit:
                    say(stuck=number)
                    return 1
                time.sleep(0.0005)
            time.sleep(raw.get("pace_s", 0.0))
            before = state.written
            stop = checkpointer.step(number)
            if state.written != before:
                say(saved=number, digest=digest(state.data))
            if checkpointer.last_error:
                say(error=checkpointer.last_error)
                checkpointer.last_error = ""
            if stop:
                say(stopped=number, digest=digest(state.data))
                return 0
        say(finished=raw["iterations"], digest=digest(state.data))
    return 0


def leader(raw: dict[str, Any]) -> int:
    """Host a leader; commands on standard input, events on standard output."""
    made = Leader(
        info=RunInfo(**raw["info"]),
        nodes=raw["nodes"],
        ranks_per_node=raw["ranks_per_node"],
        run_dir=raw["run_dir"],
        host="127.0.0.1",
        auth=KeyAuth(paths.leader_key(raw["run_dir"])).create(),
    )
    import threading

    def tell() -> None:
        while True:
            happened = made.events.get()
            print(json.dumps({"event": type(happened).__name__, **vars(happened)}, default=vars), flush=True)

    threading.Thread(target=tell, daemon=True).start()
    print(json.dumps({"event": "up", "address": made.address}), flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "checkpoint":
            made.notice(Notice(kind=NoticeKind.PERSON, stop=False))
        elif words[0] == "stop":
            made.notice(Notice(kind=NoticeKind.WALLTIME, stop=True, deadline_s=time.time() + float(words[1])))
        elif words[0] == "cycle":
            made.start_cycle(int(words[1]))
        elif words[0] == "goodbye":
            made.goodbye()
    return 0


if __name__ == "__main__":
    log.configure()
    sys.exit({"agent": agent, "rank": rank, "leader": leader}[sys.argv[1]](json.loads(sys.argv[2])))
