"""A rank that does nothing but step, as fast as it can; at each save it writes the iteration down. Run by the tests.

    python racer.py PAGE LOCAL_RANK LOG PACE_S [PAGE_OF_ANOTHER_NODE...]

Loosely synchronised as in data-parallel training: no rank is more than one iteration ahead of another. An iteration
takes as long as that at least. The word after the page's blocks says when to end.
"""

from __future__ import annotations

import sys
import time

from slurm_resil.agent.seat import Kind, Seat
from slurm_resil.core import control as c


def main(path: str, local_rank: int, log: str, pace_s: float, *elsewhere: str) -> None:
    page = c.ControlPage.open(path)
    seat = Seat(page, local_rank, decision_wait_s=30)
    words, at = seat.words, seat.iteration
    pages = [page, *map(c.ControlPage.open, elsewhere)]
    others = [(each.words, each.block(other) + c.ITERATION) for each in pages for other in range(each.ranks)]
    others.remove((words, at))
    end = c.HEAD_WORDS + page.ranks * c.BLOCK_WORDS
    iteration = 0
    with open(log, "w") as file:
        while True:
            iteration += 1
            if pace_s:
                time.sleep(pace_s)
            while any(theirs[other] < iteration - 1 for theirs, other in others):  # the collective
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


main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), *sys.argv[5:])
