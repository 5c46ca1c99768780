"""A rank that does nothing but step, as fast as it can; at each save it writes the iteration down. Run by the tests.

    python racer.py PAGE LOCAL_RANK LOG

Loosely synchronised as in data-parallel training: no rank is more than one iteration ahead of another. The word after
the page's blocks says when to end.
"""

from __future__ import annotations

import sys
import time

from slurm_resil.agent.seat import Kind, Seat
from slurm_resil.core import control as c


def main(path: str, local_rank: int, log: str) -> None:
    page = c.ControlPage.open(path)
    seat = Seat(page, local_rank, decision_wait_s=30)
    words, at = seat.words, seat.iteration
    others = [page.block(other) + c.ITERATION for other in range(page.ranks) if other != local_rank]
    end = c.HEAD_WORDS + page.ranks * c.BLOCK_WORDS
    iteration = 0
    with open(log, "w") as file:
        while True:
            iteration += 1
            while any(words[other] < iteration - 1 for other in others):  # the collective
                time.sleep(2e-5)
                if words[end]:
                    return
            words[at] = iteration
            if words[c.PROPOSAL]:
                order = seat.look(iteration)
                if order.kind is not Kind.NOTHING:
                    print(order.epoch, iteration, int(order.sure), file=file, flush=True)
                    seat.acted(iteration)
            if words[end]:
                return


main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
