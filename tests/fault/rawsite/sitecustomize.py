"""On PYTHONPATH, gives `slurm-resil agent` and `mover drain` the store of tests/fault/raw.py: no torch, HDF5, MPI.

The launcher, leader, agents, session and Slurm steps around them are the real ones.
"""

import json
import os
import sys
import time
from pathlib import Path

FAULT = str(Path(__file__).resolve().parents[1])


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def end(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)  # SystemExit is not heard in here


def agent() -> None:
    sys.path.insert(0, FAULT)
    from raw import RawStore

    from slurm_resil.cli import agent as cli

    cli.BurstBuffer = RawStore  # type: ignore[misc,assignment] -- this is the point


def drain(arguments: list[str]) -> None:
    """Copy the shards of this node; the process of the first node publishes once all are there."""
    sys.path.insert(0, FAULT)
    from raw import RawStore

    from slurm_resil.core import fsio, paths, pins
    from slurm_resil.format.manifest import ShardManifest

    run_dir, job_dir = option(arguments, "--run-dir"), option(arguments, "--job-dir")
    iteration = int(option(arguments, "--iteration"))
    time.sleep(float(os.environ.get("RAW_DRAIN_S", "0.05")))
    if Path(run_dir, "no-drain").exists():
        print(json.dumps({"event": "failed", "error": "storage refuses", "exit_code": 1}))
        end(1)
    with pins.hold(job_dir, iteration):
        for rank, path in RawStore(job_dir).sealed().get(iteration, {}).items():
            manifest = ShardManifest.load(path)
            target = os.path.join(run_dir, f"raw-{iteration}-{rank}")
            fsio.write_atomic(f"{target}.bin", Path(job_dir, "slots", manifest.slot).read_bytes(), sync=False)
            fsio.write_json(f"{target}.json", manifest.items[0].xxh3, sync=False)
    if os.environ.get("SLURM_PROCID", "0") != "0":
        end(0)
    names = [os.path.join(run_dir, f"raw-{iteration}-{n}") for n in range(int(os.environ["SLURM_RESIL_WORLD_SIZE"]))]
    limit = time.monotonic() + 3
    while not all(os.path.exists(f"{name}.json") for name in names):
        if time.monotonic() > limit:
            print(json.dumps({"event": "failed", "error": "not all ranks have sealed", "exit_code": 75}))
            end(75)
        time.sleep(0.02)
    xxh3 = [json.loads(Path(f"{name}.json").read_text()) for name in names]
    document = {"files": [f"{name}.bin" for name in names], "xxh3": xxh3}
    fsio.write_json(paths.drained_manifest(run_dir, iteration), document, sync=False)
    print(json.dumps({"event": "drained", "iteration": iteration, "seconds": 0.1}))
    end(0)


if sys.orig_argv[1:4] == ["-m", "slurm_resil", "agent"]:
    agent()
elif sys.orig_argv[1:5] == ["-m", "slurm_resil", "mover", "drain"]:
    drain(sys.orig_argv[5:])
