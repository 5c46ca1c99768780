"""A training script without torch, for tests of the launcher: `raw_train.py --iterations 50 --pace 0.05 ...`.

Every rank's state follows from the iteration and the state before, so its digest at the end tells whether anything was
lost, repeated or mixed. Output: JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from raw import RawState, RealState

from slurm_resil.agent.place import from_env
from slurm_resil.format.manifest import digest
from slurm_resil.session import Checkpointer


class Together:
    """The collective that keeps ranks together: nobody is ahead of the others by more than one iteration."""

    def __init__(self, rank: int, world: int) -> None:
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.others: list[socket.socket] = []
        if rank == 0:
            with socket.create_server(("", where[1]), backlog=world) as server:
                self.others = [server.accept()[0] for _ in range(world - 1)]
            return
        limit = time.monotonic() + 60
        while not self.others:
            try:
                self.others = [socket.create_connection(where, timeout=5)]
            except OSError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.05)
        self.others[0].settimeout(None)

    def __call__(self, rank: int) -> None:
        if rank:
            self.others[0].sendall(b".")
        for other in self.others:
            if not other.recv(1):
                raise ConnectionError("a rank is gone")
        if not rank:
            for other in self.others:
                other.sendall(b".")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--pace", type=float, default=0.05)
    parser.add_argument("--fail", action="append", default=[], help="RANK:ITERATION:CODE[:once]; CODE -9: by SIGKILL")
    parser.add_argument("--deaf-from", type=int, help="stop calling step() at this iteration: as if blocked")
    parser.add_argument("--linger", action="store_true", help="do not end after a stop")
    parser.add_argument("--await", dest="go", type=Path, help="restore only once this file is there")
    parser.add_argument("--real", action="store_true", help="real slots, and so real movers")
    options = parser.parse_args()
    place = from_env(os.environ)
    state = RealState(place) if options.real else RawState(place)
    fails = [fail.split(":") for fail in options.fail]

    def say(**fields: object) -> None:
        sys.stdout.write(json.dumps({"rank": place.rank, "node": place.node, **fields}) + "\n")  # one write
        sys.stdout.flush()

    limit = time.monotonic() + 120
    while options.go is not None and not options.go.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    with Checkpointer(place, state.store, every=place.every) as checkpointer:
        start = checkpointer.restore(timeout_s=60)
        together = Together(place.rank, place.info.world_size)
        say(start=start, loaded=state.loaded, cycle=place.info.cycle, attempt=place.info.attempt, pid=os.getpid())
        for number in range(start + 1, options.iterations + 1):
            for rank, at, code, *once in fails:
                marker = Path(place.run_dir, f"failed-{rank}-{at}")
                if (place.rank, number) == (int(rank), int(at)) and not (once and marker.exists()):
                    marker.touch()
                    if int(code) < 0:
                        os.kill(os.getpid(), -int(code))
                    return int(code)
            while options.deaf_from is not None and number >= options.deaf_from:
                time.sleep(0.1)
            state.train(number)
            time.sleep(options.pace)
            together(place.rank)
            if checkpointer.step(number):
                say(stopped=number)
                while options.linger:
                    signal.pause()
                return 0
        say(finished=options.iterations, digest=digest(bytes(state.data)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
