"""A program that uses async_save and load; started by test_standalone.

Usage: standalone_child.py exit|save|load DIRECTORY [RANK WORLD MEETING]
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import slurm_resil as sr


def main() -> None:
    verb, out, *place = sys.argv[1:]
    rank = world = 0
    if place:
        rank, world = int(place[0]), int(place[1])
        dist.init_process_group("gloo", init_method=f"file://{place[2]}", rank=rank, world_size=world)
    if verb == "exit":  # and no word of waiting
        for value in (1, 2, 3):
            sr.async_save({"a": torch.full((1000,), float(value)), "n": value}, out, backpressure="wait")
    elif verb == "save":
        levels = []
        for value in (1, 2, 3):
            state = {
                "all": torch.full((500,), float(value)),
                "mine": torch.full((3,), float(10 * value + rank)),
                "n": value,
            }
            handle = sr.async_save(state, out, backpressure="wait")
            try:
                handle.durable.result(60)
                levels.append(str(handle.iteration))
            except sr.ResilError:
                levels.append("failed")
        print("durable", *levels)
        dist.barrier()
    else:
        state = {"all": torch.zeros(500), "mine": torch.zeros(3), "n": 0}
        number = sr.load(state, out, private="rank_mod", timeout_s=60)
        assert state["n"] == number
        assert bool((state["all"] == number).all())
        assert bool((state["mine"] == 10 * number + rank % 2).all())
        print("loaded", number)
    if place:
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
