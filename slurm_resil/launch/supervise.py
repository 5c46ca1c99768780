"""The launcher's loop: hears leader, steps, deadline and signals; asks the policy; does what it says."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from slurm_resil.agent import events as e
from slurm_resil.agent.leader import Leader
from slurm_resil.agent.survey import drained_iterations
from slurm_resil.core import paths, priority
from slurm_resil.core.errors import NotPermittedError, ResilError
from slurm_resil.core.log import event
from slurm_resil.core.model import Notice
from slurm_resil.launch import moves as m
from slurm_resil.launch.cluster import Cluster
from slurm_resil.launch.commands import Job
from slurm_resil.launch.lanes import Lanes
from slurm_resil.launch.latejob import LateJob
from slurm_resil.launch.policy import Policy
from slurm_resil.launch.records import Attempt, EventLog
from slurm_resil.launch.retain import Pruner
from slurm_resil.launch.spoken import SPOKEN
from slurm_resil.launch.starters import Starter
from slurm_resil.launch.steps import Step
from slurm_resil.launch.verdict import FINAL, Verdict

TICK_S = 0.1
WATCH_S = 1.0
BEAT_S = 1.2
GOODBYE_S = 5.0
KILLED_S = 3.0  # from killing a step at the end of the attempt to leaving it to Slurm
STATUS_S = 1.0
COMING_S = 30.0  # what an agent may take to join before another one is started
JOIN_GRACE_S = 3.0  # from the end of an agents' step until its silent nodes are looked at
log = logging.getLogger(__name__)


class Engine(Protocol):
    """The recovery engine, as the launcher needs it."""

    def continue_job(self, job_id: int, *, bad_nodes: Sequence[str], reason: str, level: str) -> str:
        """Have the job started again; returns words once the engine has taken it over.

        Raises:
            ResilError: It does not answer, or does not do it.
        """
        ...


class Watch(Protocol):
    """Looks at the job's deadline; may take its time."""

    def __call__(self, *, hurry: bool = False) -> list[Notice]:
        """Notices that are due; ``hurry``: ask Slurm now, not the last answer."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Host(e.LeaderEvent):
    """Something of the launcher's own, in the leader's order of events."""

    event: m.Event


class Supervisor:
    """One attempt.

    Args:
        job: What the command lines are made from.
        command: User's command.
        policy: Decides.
        leader: Already running.
        cluster: Slurm.
        starter: Starts steps.
        events: Event log.
        attempt: Record of this attempt.
        engine: Recovery engine, None if there is none.
        watch: Looks at the job's deadline.
        cap_bytes_s: Bandwidth of drains while training.
        drain_args: More arguments of drains.
        pruner: Deletes old checkpoints; None if nobody does.
        late: Job that drains what this one leaves; None if there is none.
    """

    def __init__(
        self,
        *,
        job: Job,
        command: Sequence[str],
        policy: Policy,
        leader: Leader,
        cluster: Cluster,
        starter: Starter,
        events: EventLog,
        attempt: Attempt,
        engine: Engine | None = None,
        watch: Watch | None = None,
        cap_bytes_s: float | None = None,
        drain_args: Sequence[str] = (),
        pruner: Pruner | None = None,
        late: LateJob | None = None,
    ) -> None:
        self._job, self._command = job, tuple(command)
        self._policy, self._leader, self._cluster, self._starter = policy, leader, cluster, starter
        self._events, self._attempt, self._engine, self._watch = events, attempt, engine, watch
        self._pruner, self._late_job = pruner, late
        self._inbox: queue.SimpleQueue[m.Event] = queue.SimpleQueue()
        self._signals: deque[int] = deque()
        self._agents: list[Step] = []
        self._ranks: Step | None = None
        self._movers = Lanes(
            job, starter, cap_bytes_s=cap_bytes_s, drain_args=drain_args, say=self.report, put=self._inbox.put
        )
        self._starting: tuple[float, int] | None = None
        self._present: set[str] = set()
        self._coming: dict[str, Step] = {}  # the newest start of a node's agent that was not the first
        self._late: dict[str, Step] = {}  # one that has not joined in time
        self._over = threading.Event()
        self._hurry = threading.Event()  # a stop without a deadline was heard
        self._code: int | None = None
        self._cycle = 0
        self._levels: dict[str, int] = {}

    def run(self) -> int:
        """Supervise until the attempt is over; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signal)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # they are for the agents
        self._thread(self._pump, "leader events")
        if self._watch is not None:
            self._thread(self._watch_deadline, "deadline")
        self._start_agents(0, self._job.layout.nodes)
        self._do(self._policy.start())
        while self._code is None:
            with contextlib.suppress(queue.Empty):
                self._hear(self._inbox.get(timeout=TICK_S))
            while self._signals:
                self._hear(m.Asked(signum=self._signals.popleft()))
            if self._starting is not None and time.monotonic() >= self._starting[0]:
                cycle, self._starting = self._starting[1], None
                self._start_ranks(cycle)
            self._hear(m.Tick())
        self._over.set()
        return self._code

    # hearing

    def _hear(self, happened: m.Event) -> None:
        match happened:
            case m.Restored():
                self._reached(local=happened.iteration, protected=happened.protected, durable=happened.durable)
                if happened.iteration > happened.durable:
                    self._may_leave_something()
            case m.SealedAll():
                self._reached(local=happened.iteration)
                self._may_leave_something()
        self._do(self._policy.on(happened, time.monotonic()))

    def _may_leave_something(self) -> None:
        """There is a checkpoint that is not durable: whatever becomes of this job, somebody is to drain it."""
        if self._late_job is not None and not self._late_job.released:
            self._thread(self._late_job.needed, "late job")

    def _signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)

    def _thread(self, target: Callable[[], None], name: str) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    def _pump(self) -> None:
        """Thread: the leader's events, in its order."""
        while not self._over.is_set():
            with contextlib.suppress(queue.Empty):
                heard = self._translate(self._leader.events.get(timeout=1.0))
                if heard is not None:
                    self._inbox.put(heard)

    def _translate(self, happened: e.LeaderEvent) -> m.Event | None:
        match happened:
            case _Host():
                return happened.event
            case e.Restored():
                durable = newest_durable(self._job.run_dir, up_to=happened.iteration)
                self._record(restored=happened.iteration)
                return m.Restored(
                    iteration=happened.iteration, cycle=happened.cycle, protected=happened.protected, durable=durable
                )
            case e.RebuildWanted():
                return m.RebuildWanted(iteration=happened.iteration, nodes=happened.nodes)
            case e.RestoreFailed():
                words = self._said_by(happened.rank, "cannot load its part") or happened.why
                return m.RestoreFailed(why=happened.why, words=words, final=happened.final)
            case e.SetAside():
                return m.SetAside(**vars(happened))
            case e.SealedAll():
                return m.SealedAll(iteration=happened.iteration)
            case e.SaveFailed():
                words = self._said_by(happened.told_by, "could not save") or happened.why
                return m.SaveFailed(iteration=happened.iteration, why=happened.why, words=words)
            case e.NoticeSeen():
                notice = happened.notice
                deadline = None
                if notice.deadline_s is not None:
                    deadline = time.monotonic() + notice.deadline_s - time.time()
                elif notice.stop:
                    self._hurry.set()
                return m.Noticed(kind=notice.kind, stop=notice.stop, deadline=deadline, source=notice.source)
            case e.StopReached():
                return m.StopReached(iteration=happened.iteration, saved=happened.saved)
            case e.NodeJoined():
                self._present.add(happened.node)
                return m.NodeJoined(node=happened.node)
            case e.NodeLost():
                self._present.discard(happened.node)
                return m.NodeLost(node=happened.node, why=happened.why)
            case _:
                return None

    def _watch_deadline(self) -> None:
        """Thread: looking at Slurm may take seconds."""
        assert self._watch is not None
        while not self._over.is_set():
            hurry = self._hurry.wait(WATCH_S)
            self._hurry.clear()
            try:
                for notice in self._watch(hurry=hurry):
                    self._leader.notice(notice)
            except ResilError as error:
                event(log, "watch_failed", level=logging.WARNING, why=str(error))

    def _ranks_ended(self, verdict: Verdict) -> None:
        """Thread. Through the leader's queue: what it said before the ranks could end is heard before their end."""
        at = None
        if not verdict.ok:
            # agents report where the ranks were once a second; they look at the page, dead ranks or not
            self._over.wait(BEAT_S)
            at = self._leader.iteration or None
        self._leader.events.put(_Host(event=m.RanksEnded(verdict=verdict, at=at)))

    def _agents_ended(self, nodes: Sequence[str], code: int, lines: Sequence[str]) -> None:
        """Thread. An srun may die and its agents live: only nodes whose agent is not heard are in question."""
        if code in FINAL and not self._present.intersection(nodes):
            words = next((line.partition("slurm-resil: ")[2] for line in lines if "slurm-resil: " in line), "")
            words = f"no agent can start: {words or 'see the log of the agents'}"
            self._inbox.put(m.AgentsRefused(code=code, words=words))
            return
        if self._over.wait(JOIN_GRACE_S):
            return
        for node in nodes:
            if node not in self._present:
                self._inbox.put(m.NodeLost(node=node, why=f"the step of its agent ended with code {code}"))

    def _said_by(self, rank: int | None, what: str) -> str:
        """What a rank has told people itself: who it is and where all of it stands. Empty if it was no rank."""
        if rank is None:
            return ""
        return f"rank {rank} on {self._job.layout.node(rank)} {what} and says why; also in {self._events.path}"

    # doing

    def _do(self, actions: Sequence[m.Action]) -> None:
        for action in actions:
            match action:
                case m.Report():
                    self.report(action.event, **action.fields)
                case m.StartCycle():
                    self._starting = (time.monotonic() + action.delay_s, action.cycle)
                case m.KillRanks():
                    self._starting = None
                    event(log, "kill_ranks", why=action.why)
                    if self._ranks is not None:
                        self._ranks.kill()
                case m.Drain() | m.Encode() | m.Rebuild() | m.Fetch():
                    self._movers.start(action)
                case m.HurryDrain():
                    self._movers.hurry(action)
                case m.CancelDrain():
                    self._movers.kill("drain", action.why)
                case m.CancelEncode():
                    self._movers.kill("encode", action.why)
                case m.CancelRebuild():
                    self._movers.kill("rebuild", action.why)
                case m.CancelFetch():
                    self._movers.kill("fetch", action.why)
                case m.Prune():
                    self._thread(lambda action=action: self._prune(action), "prune")  # type: ignore[misc] # bound now
                case m.TellDurable():
                    self._reached(durable=action.iteration)
                    self._leader.durable(action.iteration, drain_s=action.seconds)
                case m.TellProtected():
                    self._reached(protected=action.iteration)
                    self._leader.protected(action.iteration, encode_s=action.seconds)
                case m.TellUnprotected():
                    self._leader.unprotected(action.iteration)
                case m.TellRebuilt():
                    self._leader.rebuilt(action.iteration, ok=action.ok)
                case m.Probe():
                    self._thread(lambda action=action: self._probe(action), "probe")  # type: ignore[misc] # bound now
                case m.RestartAgent():
                    self._restart_agent(action.node)
                case m.Notify():
                    deadline = None if action.deadline_in_s is None else time.time() + action.deadline_in_s
                    self._leader.notice(Notice(kind=action.kind, stop=True, deadline_s=deadline, source=action.source))
                case m.Continue() | m.Hold():
                    self._thread(lambda action=action: self._hand_over(action), "requeue")  # type: ignore[misc] # bound now
                case m.AskWhetherOver():
                    self._thread(self._look_whether_over, "over")
                case m.Goodbye():
                    self._leader.goodbye()
                case m.Finish():
                    self._finish(action)
                case _:
                    raise AssertionError(action)

    def report(self, name: str, **values: object) -> None:
        """Write an event, and say it if people want to know."""
        why = self._events.write(name, **values)
        if why:
            say(f"WARNING: {why}")
        words = SPOKEN.get(name)
        if words is not None:
            values = {"attempt": self._job.info.attempt, **values}
            flat = {key: ", ".join(value) if isinstance(value, list) else value for key, value in values.items()}
            say(words.format(**flat))

    def _record(self, **values: object) -> None:
        try:
            self._attempt.update(**values)
        except OSError as error:
            say(f"WARNING: cannot write the record of this attempt: {error}")

    def _reached(self, **levels: int) -> None:
        """Record the newest iteration at each level, for whoever looks at the job from outside."""
        self._levels |= levels
        self._record(levels=dict(self._levels))

    def _start_agents(self, cycle: int, nodes: Sequence[str]) -> Step:
        step = self._starter.agents(cycle, nodes, lambda code, lines: self._agents_ended(nodes, code, lines))
        self._agents.append(step)
        self._thread(lambda: self._expect(step, nodes), "agents expected")
        return step

    def _expect(self, step: Step, nodes: Sequence[str]) -> None:
        """Thread. Whether a step of agents hangs or was killed unheard: an agent that does not join is lost."""
        if self._over.wait(COMING_S):
            return
        for node in nodes:
            if node not in self._present and step.running:
                self._late[node] = step
                self._inbox.put(m.NodeLost(node=node, why=f"its agent did not join in {COMING_S:g} s"))

    def _restart_agent(self, node: str) -> None:
        coming = self._coming.get(node)
        if node in self._present or (coming is not None and coming.running and coming is not self._late.get(node)):
            return
        self._coming[node] = self._start_agents(self._cycle, (node,))

    def _start_ranks(self, cycle: int) -> None:
        if cycle:
            self._leader.start_cycle(cycle)
        self._cycle = cycle
        self.report("cycle_start", cycle=cycle)
        self._ranks = self._starter.ranks(cycle, self._command, self._ranks_ended)

    def _prune(self, action: m.Prune) -> None:
        """Thread: deleting large files may take its time."""
        assert self._pruner is not None
        priority.lower_thread()
        try:
            done = self._pruner.prune(newest=action.newest)
        except Exception as error:  # noqa: BLE001 - the top of a thread: training goes on, and people are told
            self._inbox.put(m.Pruned(problem=str(error)))
            return
        if done.cleared:
            event(log, "cleared", iterations=done.cleared)
        if done.left:
            event(log, "not_pruned", left=done.left)  # tried again after the next drain
        problem = next((f"iteration {iteration}: {why}" for iteration, why in done.failed.items()), "")
        self._inbox.put(m.Pruned(deleted=tuple(done.deleted), nbytes=done.nbytes, problem=problem))

    def _probe(self, action: m.Probe) -> None:
        """Thread."""
        time.sleep(action.delay_s)
        alive: dict[str, bool] = {}
        try:
            alive = dict(self._cluster.alive(self._job.layout.nodes))
        except ResilError as error:
            event(log, "probe_failed", level=logging.WARNING, why=str(error))
        event(log, "probed", why=action.why, alive=alive)
        self._inbox.put(m.Probed(alive=alive))

    def _hand_over(self, action: m.Continue | m.Hold) -> None:
        """Thread: write the intent, then ask; the answer comes as an event."""
        try:
            already, words = self._ask_for_start(action)
            self._record(outcome={"words": words, "at_s": round(time.time(), 3)})
            self._inbox.put(m.Continued(accepted=True, already=already, words=words))
        except NotPermittedError as error:
            self._inbox.put(m.Continued(accepted=False, final=True, words=error.message))
        except ResilError as error:
            self._inbox.put(m.Continued(accepted=False, words=error.message))

    def _ask_for_start(self, action: m.Continue | m.Hold) -> tuple[bool, str]:
        """Ask; returns whether Slurm has ended this attempt already, and words."""
        bad = action.bad_nodes if isinstance(action, m.Continue) else ()
        intent: dict[str, object] = {"reason": action.reason, "bad_nodes": list(bad), "at_s": round(time.time(), 3)}
        if isinstance(action, m.Continue):
            intent |= {"iteration": action.iteration, "level": action.level.name}
        self._record(intent=intent, held=isinstance(action, m.Hold))
        self._events.write("requeue_intent", **intent)
        record = self._cluster.record()
        if record.restarts > self._job.restarts:
            return True, "Slurm is starting the job again already"
        if record.cancelled:
            raise NotPermittedError("somebody cancelled the job")
        if isinstance(action, m.Hold):
            return False, self._cluster.hold(action.reason)
        text = f'{{"run_id":"{self._job.info.run_id}","attempt":{self._job.info.attempt}}}\n'
        good = [node for node in self._job.layout.nodes if node not in bad]
        self._starter.mark(good, paths.continues(self._job.job_dir), text)
        if self._engine is not None and not action.alone:
            try:
                level = action.level.name.lower()
                words = self._engine.continue_job(
                    self._job.info.job_id, bad_nodes=bad, reason=action.reason, level=level
                )
                return False, words
            except ResilError as error:
                self.report("warning", words=f"the engine does not help: {error.message}")
        return False, self._cluster.requeue(bad_nodes=bad)

    def _look_whether_over(self) -> None:
        """Thread."""
        with contextlib.suppress(ResilError):  # what is not known is waited for
            if self._cluster.record().restarts > self._job.restarts:
                self._inbox.put(m.Continued(accepted=True, already=True))

    def _finish(self, action: m.Finish) -> None:
        self._leader.goodbye()
        self._movers.close(STATUS_S)
        for step in (self._ranks, *self._movers.steps):
            if step is not None and step.running and not self._policy.handed_over:
                step.kill()
        if action.done:
            with contextlib.suppress(ResilError, OSError):
                if self._job.info.attempt:
                    nodes = self._job.layout.nodes
                    self._starter.mark(nodes, paths.continues(self._job.job_dir), "")
        if self._policy.handed_over:
            # Slurm is killing everything as it is; only our own ends of it could outlive that
            for step in (*self._agents, self._ranks, *self._movers.steps):
                if step is not None:
                    step.abandon()
            self._code = action.code
            return
        # what goes on, or even starts, when the batch script ends may keep Slurm from ending the job for a minute
        left = [step for step in (*self._agents, self._ranks, *self._movers.steps) if step is not None]
        for wait_s, last in ((GOODBYE_S, False), (KILLED_S, True)):
            limit = time.monotonic() + wait_s
            left = [step for step in left if step.wait(max(0.0, limit - time.monotonic())) is None]
            for step in left:
                if last:
                    step.abandon()
                else:
                    step.kill()
        self._leader.close()
        self._record(outcome={"words": action.words, "code": action.code, "at_s": round(time.time(), 3)})
        self._code = action.code


def newest_durable(run_dir: str, *, up_to: int | None = None) -> int:
    """Newest drained iteration of a run, 0 if there is none or nobody can tell.

    Args:
        run_dir: Run's directory.
        up_to: What training goes on from: a newer one could not be restored, and the drains begin again below it.
    """
    with contextlib.suppress(OSError):
        return max((one for one in drained_iterations(run_dir) if up_to is None or one <= up_to), default=0)
    return 0


def say(words: str) -> None:
    """Tell people."""
    sys.stderr.write(f"slurm-resil: {words}\n")
    sys.stderr.flush()
