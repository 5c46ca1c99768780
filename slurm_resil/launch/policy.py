"""What the launcher does about what happens: events in, actions out. No I/O, no clock of its own.

Phases::

    RUNNING ──stop notice──▶ STOPPING ──saved, drained, ranks gone (or no time left)──▶ CONTINUING ──accepted──▶ WAITING
       │  ▲                                                                          ▲                        │
       │  └─ranks failed, nodes healthy: next cycle                      node lost ──┘            killed by Slurm
       └──ranks ended well (or no restart is left)──▶ FINISHING ──newest checkpoint durable──▶ DONE

Times are seconds on one monotonic clock that the caller passes in.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from slurm_resil.core.errors import EXIT_BAD_DATA, EXIT_FAILED, EXIT_TRY_AGAIN
from slurm_resil.core.model import Level, NoticeKind
from slurm_resil.launch import moves as m
from slurm_resil.launch.agents import Agents
from slurm_resil.launch.drains import Drains
from slurm_resil.launch.encodes import Chosen, Encodes, Uniform
from slurm_resil.launch.fetches import Fetches
from slurm_resil.launch.guard import AttemptRecord, RestartBudget, why_hold
from slurm_resil.launch.phase import Phase as Phase
from slurm_resil.launch.prunes import Prunes
from slurm_resil.launch.rebuilds import Rebuilds
from slurm_resil.launch.rules import Rules as Rules
from slurm_resil.launch.verdict import Verdict


class Policy:
    """State of one attempt; :meth:`on` is its only door.

    Args:
        nodes: Nodes that run ranks, by node_rank.
        rules: Bounds and margins.
        durable: Newest durable iteration at the start, 0 if none.
        history: Attempts before this one, for the loop guard.
        chosen: How checkpoints are protected, and which are drained.
        sets: Nodes that protect each other.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        rules: Rules,
        *,
        durable: int = 0,
        history: Sequence[AttemptRecord] = (),
        chosen: Chosen | None = None,
        sets: Sequence[Sequence[str]] = (),
    ) -> None:
        self.nodes = tuple(nodes)
        self.sets = tuple(map(tuple, sets))
        self.chosen = chosen or Uniform()
        self.saved = 0  # checkpoints of this attempt
        self.rules = rules
        self.history = tuple(history)
        self.phase = Phase.RUNNING
        self.cycle = 0
        self.drains = Drains(rules, durable=durable)
        self.encodes = Encodes(
            self.chosen,
            guess_s=rules.encode_guess_s,
            tries=rules.encode_tries,
            retry_s=rules.retry_s,
            limit_s=rules.encode_limit_s,
        )
        self.rebuilds = Rebuilds(rules.rebuild_limit_s)
        self.fetches = Fetches(durable if rules.fetches else 0)
        self.lanes = (self.fetches, self.rebuilds, self.encodes, self.drains)
        self.prunes = Prunes(wanted=rules.prunes, wait_s=rules.prune_wait_s)
        self.ranks_up = False
        self.loading = False  # the ranks of this cycle have not restored yet
        self.budget = RestartBudget(bound=rules.max_restarts)
        self.exit = (0, "")
        self.restored = 0
        self.unfit = False  # the checkpoint and the ranks do not fit
        self.unsaved: tuple[int, str] | None = None  # the newest save, if it failed
        # the stop
        self.kinds: set[NoticeKind] = set()
        self.given: float | None = None  # deadline that somebody named
        self.assumed: float | None = None  # the least that Slurm leaves, counted while nobody has named one
        self.stop_at: int | None = None
        self.leave_since: float | None = None
        self.asked, self.told = 0, False
        # nodes
        self.agents = Agents(rules.agent_restarts)
        self.probing = False
        self.probes = 0
        self.ended: m.RanksEnded | None = None
        self.killed_why = ""
        # the requeue
        self.request: m.Continue | m.Hold | None = None
        self.retry_at: float | None = None
        self.accepted_at = 0.0
        self.handed_over = False

    def start(self) -> list[m.Action]:
        """Actions of the beginning."""
        self.ranks_up = self.loading = True
        return [m.StartCycle(cycle=0), *self.fetches.start()]

    def on(self, event: m.Event, now: float) -> list[m.Action]:
        """Hear an event; returns what to do, in order."""
        if self.phase is Phase.DONE:
            return []
        match event:
            case m.Restored():
                actions = self._restored(event)
            case m.SealedAll():
                actions = self._sealed(event.iteration)
            case m.RebuildWanted():
                actions = self._rebuild_wanted(event, now)
            case m.SaveFailed():
                self.unsaved = (event.iteration, event.words or event.why)
                actions = [_report("save_failed", iteration=event.iteration, why=event.why, words=self.unsaved[1])]
            case m.RestoreFailed():
                self.unfit = event.final
                actions = [_report("restore_failed", why=event.why, words=event.words)]
            case m.SetAside():
                actions = [_report("set_aside", **vars(event))]
            case m.Noticed():
                actions = self._noticed(event, now)
            case m.StopReached():
                actions = self._stop_reached(event)
            case m.NodeJoined():
                self.agents.joined(event.node)
                actions = []
            case m.NodeLost():
                actions = self._node_lost(event)
            case m.AgentsRefused():
                actions = self._agents_refused(event)
            case m.Probed():
                actions = self._probed(event, now)
            case m.RanksEnded():
                actions = self._ranks_ended(event)
            case m.MoverEnded(kind="drain"):
                actions = self.drains.ended(event, now)
                if event.ok:
                    self.prunes.ask(event.iteration)
            case m.DrainBegan():
                actions = self.drains.began(event, now)
            case m.OrderTaken():
                actions = self.drains.taken(event)
            case m.MoverEnded(kind="encode"):
                actions = self.encodes.ended(event, now)
            case m.MoverEnded():
                actions = (self.fetches if event.kind == "fetch" else self.rebuilds).ended(event)
            case m.Pruned():
                actions = self.prunes.ended(event)
            case m.Asked():
                actions = self._asked(event, now)
            case m.Continued():
                actions = self._continued(event, now)
            case _:
                actions = []
        return actions + self._advance(now)

    @property
    def deadline(self) -> float | None:
        """When everything must be over, None if nothing is known."""
        return self.given if self.given is not None else self.assumed

    # events

    def _restored(self, event: m.Restored) -> list[m.Action]:
        # more than what is durable: the attempt before had no time to drain it
        self.drains.restored(event.iteration, event.durable)
        self.encodes.restored(event.iteration, event.protected)
        self.restored, self.unfit, self.loading = event.iteration, False, False
        self.prunes.ask(event.iteration)
        report = _report("restore", iteration=event.iteration, cycle=event.cycle)
        actions: list[m.Action] = [report, *self.fetches.cancel("the ranks have restored")]
        # a person who released a held job may try once more
        if event.cycle or (self.history and self.history[-1].held):
            return actions
        why = why_hold(self.history, event.iteration, self.rules.max_idle_attempts)
        if why is None:
            return actions
        actions += [_report("held", reason=why), m.KillRanks(why=why)]
        return actions + self._request(m.Hold(reason=why))

    def _sealed(self, iteration: int) -> list[m.Action]:
        if self.unsaved and iteration >= self.unsaved[0]:
            self.unsaved = None
        actions: list[m.Action] = [_report("sealed", iteration=iteration)]
        if iteration > self.drains.sealed:
            self.drains.all_sealed(iteration, due=self.chosen.drained(self.saved))
            actions += self.encodes.all_sealed(iteration, self.saved)
            self.saved += 1
        return actions

    def _rebuild_wanted(self, event: m.RebuildWanted, now: float) -> list[m.Action]:
        if self.phase in (Phase.RUNNING, Phase.STOPPING):
            return self.rebuilds.start(event, now)
        return []

    def _noticed(self, event: m.Noticed, now: float) -> list[m.Action]:
        fields = {"kind": str(event.kind), "stop": event.stop, "source": event.source}
        if not event.stop:
            return [_report("notice", **fields)]
        new = event.kind not in self.kinds
        self.kinds.add(event.kind)
        if event.deadline is not None:
            self.given = event.deadline if self.given is None else min(self.given, event.deadline)
        elif event.kind is not NoticeKind.PERSON and self.assumed is None:
            self.assumed = now + self.rules.kill_wait_s
        if self.phase is Phase.RUNNING:
            self.phase = Phase.STOPPING
        # there is a deadline, or the nodes are wanted soon
        hurry = self.drains.hurry(now, finish=False)
        return [*([_report("notice", **fields)] if new else []), *hurry]

    def _stop_reached(self, event: m.StopReached) -> list[m.Action]:
        self.stop_at = event.iteration
        actions = self._sealed(event.iteration)[1:]  # heard before, or this is it
        if self.phase is Phase.RUNNING:
            self.phase = Phase.STOPPING
        why = f"iteration {event.iteration} is the one to keep, without a cap"
        report = _report("stop", iteration=event.iteration, saved=event.saved)
        actions += [report, *self.encodes.cancel(why, unless=event.iteration)]
        return [*actions, *self.drains.cancel(why, unless=event.iteration)]

    def _node_lost(self, event: m.NodeLost) -> list[m.Action]:
        if self.phase in (Phase.CONTINUING, Phase.WAITING):
            return []
        self.agents.lost[event.node] = event.why
        return self._probe(f"{event.node}: {event.why}")

    def _agents_refused(self, event: m.AgentsRefused) -> list[m.Action]:
        if self.phase not in (Phase.RUNNING, Phase.STOPPING):
            return []
        return [m.KillRanks(why=event.words), *self._finish(event.code, event.words)]

    def _probe(self, why: str, delay_s: float = 0.0) -> list[m.Action]:
        if self.probing:
            return []
        self.probing = True
        return [m.Probe(why=why, delay_s=delay_s)]

    def _probed(self, event: m.Probed, now: float) -> list[m.Action]:
        self.probing = False
        if self.phase in (Phase.CONTINUING, Phase.WAITING):
            return []
        dead = [node for node in self.nodes if not event.alive.get(node, True)]
        certain = [node for node in dead if node in self.agents.lost]
        if dead and not certain and self.probes < self.rules.unsure_probes:
            # slurmd may be restarting: the agent's silence decides, for a bounded time
            self.probes += 1
            return self._probe(f"{','.join(dead)}: slurmd is silent, its agent is not", delay_s=1.0)
        self.probes = 0
        if dead:
            return self._nodes_dead(dead)
        actions, given_up = self.agents.restart(self.drains.newest)
        if self.ended is not None:
            ended, self.ended = self.ended, None
            return actions + self._ranks_failed(ended)
        if given_up:
            self.killed_why = given_up
            actions.append(m.KillRanks(why=given_up))
        return actions

    def _nodes_dead(self, dead: list[str]) -> list[m.Action]:
        why = "; ".join(f"{node}: {self.agents.lost.get(node, 'slurmd does not answer')}" for node in dead)
        self.ended = None
        # what only the dead nodes held is gone: what others can rebuild counts, and the drained checkpoint
        newest, level = self.drains.durable, Level.DURABLE
        if self.encodes.protected > newest and self._survives(dead):
            newest, level = self.encodes.protected, Level.PROTECTED
        lost = f"lost {', '.join(dead)}"
        fields = {"durable": self.drains.durable, "protected": self.encodes.protected, "sealed": self.drains.sealed}
        actions: list[m.Action] = [
            _report("node_lost", nodes=dead, why=why, iteration=newest, level=level.name.lower(), **fields),
            m.KillRanks(why=lost),
        ]
        for lane in self.lanes:
            actions += lane.cancel(lost)
        if not self.rules.can_continue:
            words = f"lost {', '.join(dead)} and the job cannot be requeued: {self.rules.why_not}"
            return [*actions, *self._finish(EXIT_TRY_AGAIN, words)]
        request = m.Continue(reason="node_loss", bad_nodes=tuple(dead), iteration=newest, level=level)
        return actions + self._request(request)

    def _survives(self, dead: Sequence[str]) -> bool:
        """Whether the redundancy covers the loss of these nodes."""
        return bool(self.sets) and all(sum(node in dead for node in one) <= self.encodes.losses for one in self.sets)

    def _ranks_ended(self, event: m.RanksEnded) -> list[m.Action]:
        self.ranks_up = False
        if self.killed_why and not event.verdict.ok:  # by us: what srun says of it is no news
            event = replace(event, verdict=Verdict(code=EXIT_FAILED, words=self.killed_why))
        self.killed_why = ""
        verdict = event.verdict
        actions: list[m.Action] = [
            _report("ranks_ended", code=verdict.code, rank=verdict.rank, node=verdict.node, words=verdict.words)
        ]
        if self.phase in (Phase.CONTINUING, Phase.WAITING, Phase.FINISHING) or self.stop_at is not None:
            return actions
        if verdict.ok:
            return actions + self._finishing(0, verdict.words)
        self.ended = event
        return actions + self._probe(f"ranks ended: {verdict.words}")

    def _ranks_failed(self, event: m.RanksEnded) -> list[m.Action]:
        if self.stop_at is not None:
            return []
        if self.phase is Phase.STOPPING:
            # they died on the way to the stop: the newest sealed checkpoint is what there is
            self.stop_at = self.drains.newest
            return [_report("stop", iteration=self.stop_at, words="the ranks died before they saved")]
        verdict, restorable = event.verdict, self.drains.newest
        final = verdict.final or ("bad data" if self.unfit else "")
        if final:
            words = f"not started again, it would end the same way ({final}): {verdict.words}"
            code = verdict.code if verdict.final else EXIT_BAD_DATA
            return [_report("give_up", words=words), *self._finishing(code, words)]
        self.budget, why = self.budget.failed(event.verdict, restorable=restorable, at=event.at)
        if why is not None:
            return [_report("give_up", words=why), *self._finishing(event.verdict.code, why)]
        self.cycle += 1
        self.ranks_up = self.loading = True
        delay = 0.0 if self.budget.used <= 1 else float(2 ** (self.budget.used - 2))
        if event.verdict.launch_failed:
            delay = max(delay, 2.0)
        words = event.verdict.words
        report = _report("restart", cycle=self.cycle, why=words, restart=self.budget.used, of=self.budget.bound)
        stop = self.encodes.cancel("the ranks start again")  # what they restore is looked at anew
        return [report, *stop, *self.agents.complete(), m.StartCycle(cycle=self.cycle, delay_s=delay)]

    def _asked(self, event: m.Asked, now: float) -> list[m.Action]:
        if self.phase is Phase.WAITING:
            return self._finish(EXIT_TRY_AGAIN, "the job starts again")
        # it may be the one that follows the requeue, faster than the answer to the request
        self.told |= self.phase is Phase.CONTINUING and event.signum == signal.SIGTERM
        self.asked += 1
        code = 128 + event.signum
        if event.signum == signal.SIGINT and self.asked > 1:
            return [m.KillRanks(why="interrupted twice"), *self._finish(code, "interrupted twice")]
        limit = self.rules.kill_wait_s if event.signum == signal.SIGTERM else None
        if limit is not None and self.phase is Phase.STOPPING:
            self.given = min(self.given or now + limit, now + limit)
        if self.asked > 1 or self.phase is not Phase.RUNNING:
            return []
        name = signal.Signals(event.signum).name
        return [m.Notify(kind=NoticeKind.PERSON, deadline_in_s=limit, source=f"launcher got {name}")]

    def _continued(self, event: m.Continued, now: float) -> list[m.Action]:
        if self.phase is Phase.WAITING and event.already:
            return self._finish(EXIT_TRY_AGAIN, "the job starts again")
        if self.phase is not Phase.CONTINUING:
            return []
        if event.accepted:
            self.phase = Phase.WAITING
            self.accepted_at = now
            self.handed_over = True
            actions: list[m.Action] = [_report("requeued", words=event.words), m.Goodbye()]
            if event.already:
                # it has sent its SIGTERM before, and where it tracks processes by their parents no SIGKILL follows
                return actions + self._finish(EXIT_TRY_AGAIN, "the job starts again")
            return [*actions, m.AskWhetherOver()] if self.told else actions
        if event.final:
            words = f"the job is not continued: {event.words}"
            return [_report("not_requeued", words=event.words), *self._finish(EXIT_TRY_AGAIN, words)]
        self.retry_at = now + self.rules.retry_s
        return [_report("requeue_retry", words=event.words)]

    # time

    def _advance(self, now: float) -> list[m.Action]:
        if self.phase is Phase.STOPPING and self._leave(now):
            return self._stopped()
        if self.phase in (Phase.RUNNING, Phase.STOPPING, Phase.FINISHING):
            pruning = self.prunes.start(now, loading=self.ranks_up and self.loading)
            if pruning:
                return pruning
        if self.phase is Phase.FINISHING and self.drains.idle and not self.prunes.busy(now):
            return self._finished()
        if self.phase is Phase.CONTINUING and self.retry_at is not None and now >= self.retry_at:
            self.retry_at = None
            assert self.request is not None
            return [self.request]
        if self.phase is Phase.WAITING and now >= self.accepted_at + self.rules.takeover_s:
            return self._takeover_failed()
        ticks = [*self.rebuilds.tick(now), *self.encodes.tick(now), *self.drains.tick(now)]
        return [*ticks, *self._maybe_move(now)]

    def _leave(self, now: float) -> bool:
        """Whether the stop is over: everything is done, or the deadline is near."""
        if self.deadline is not None and now >= self.deadline - self.rules.margin_s:
            return True
        busy = not self.drains.idle or self.encodes.busy(self.drains.durable) or self.prunes.busy(now)
        if self.stop_at is None or busy:
            return False
        if self.leave_since is None:
            self.leave_since = now
        return not self.ranks_up or now >= self.leave_since + self.rules.leave_s

    def _stopped(self) -> list[m.Action]:
        actions: list[m.Action] = []
        if self.ranks_up:
            late = "the deadline is near" if self.stop_at is None else "the stop is saved"
            actions.append(m.KillRanks(why=late))
        for lane in self.lanes:
            actions += lane.cancel("the deadline is near")
        newest = self.drains.newest
        reached = {self.encodes.protected: Level.PROTECTED, self.drains.durable: Level.DURABLE}
        level = reached.get(newest, Level.LOCAL)
        going_on = self.kinds - {NoticeKind.PERSON, NoticeKind.CADENCE}
        if going_on and self.rules.can_continue:
            reason = str(sorted(going_on)[0])
            return actions + self._request(m.Continue(reason=reason, iteration=newest, level=level))
        saved = f"checkpoint of iteration {newest} is {level.name.lower()}"
        if self.stop_at is None:
            words = f"stopped before the ranks could save; {saved}"
        elif going_on:
            words = f"{saved}; the job cannot be requeued: {self.rules.why_not}"
        else:
            words = f"stopped as asked; {saved}"
        return actions + self._finish(EXIT_TRY_AGAIN, words)

    def _finishing(self, code: int, words: str) -> list[m.Action]:
        self.phase = Phase.FINISHING
        self.exit = (code, words)
        last = self.drains.sealed
        return self.drains.cancel(f"iteration {last} is the last one", unless=last)

    def _finished(self) -> list[m.Action]:
        code, words = self.exit
        if self.drains.sealed > self.drains.durable:
            last = self.drains.sealed
            words += f"; the checkpoint of iteration {last} could not be drained and is in the burst buffer only"
            code = code or EXIT_FAILED
        if self.unsaved:
            last = self.drains.newest
            words += f"; nothing was saved after iteration {last}: {self.unsaved[1]}"
            if last <= self.restored:  # not one that was skipped: none at all
                code = code or EXIT_FAILED
        return self._finish(code, words, done=self.exit[0] == 0 and code == 0)

    def _finish(self, code: int, words: str, *, done: bool = False) -> list[m.Action]:
        self.phase = Phase.DONE
        report = _report("finished", code=code, words=words, sealed=self.drains.sealed, durable=self.drains.durable)
        return [report, m.Finish(code=code, words=words, done=done)]

    def _request(self, request: m.Continue | m.Hold) -> list[m.Action]:
        self.phase = Phase.CONTINUING
        self.request, self.told = request, False
        self.retry_at = None
        return [request]

    def _takeover_failed(self) -> list[m.Action]:
        words = f"not killed within {self.rules.takeover_s:.0f} s of the requeue"
        assert self.request is not None
        again = replace(self.request, alone=True) if isinstance(self.request, m.Continue) else self.request
        return [_report("requeue_retry", words=words), *self._request(again)]

    def _maybe_move(self, now: float) -> list[m.Action]:
        """Start movers: protect first, then drain."""
        if self.agents.lost or self.ended is not None:
            return []  # nodes are in question
        self.drains.ready = max(self.drains.ready, self.encodes.ready if self.chosen.protects else self.drains.sealed)
        if self.phase is Phase.RUNNING:
            # what the ranks go on from is not known while they load
            encode = [] if self.loading else self.encodes.start(now, self.drains.durable)
            return [*encode, *self.drains.start(now, final=False)]
        if self.phase is Phase.FINISHING or (self.phase is Phase.STOPPING and self.stop_at is not None):
            return self._move_last(now)
        # the checkpoint of the stop is waited for as long as there is time to drain another one instead
        spare_s = self.rules.margin_s + self.drains.cost_s + 1.0
        if self.phase is Phase.STOPPING and self.deadline is not None and now >= self.deadline - spare_s:
            return self._move_last(now)
        return []

    def _move_last(self, now: float) -> list[m.Action]:
        """Make the newest checkpoint as safe as there is time for."""
        durable = self.drains.durable
        left_s = None if self.deadline is None else self.deadline - self.rules.margin_s - now
        if self.encodes.first(now, durable, left_s, self.drains.cost_s):
            return self.encodes.start(now, durable, final=True)
        if self.phase is Phase.STOPPING and self.drains.idle:  # it may have been given up
            return self.encodes.start(now, durable, final=True)
        return self.drains.start(now, final=True)


def _report(event: str, **fields: object) -> m.Report:
    return m.Report(event=event, fields=fields)
