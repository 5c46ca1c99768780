"""The agent: one process per node and attempt, as the user. It serves the node's ranks and votes for them.

The main thread owns all state and hears everything through one queue, as in the leader. The control page and the
ranks survive the agent: a new one takes the page over, and the ranks come back by themselves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from slurm_resil.agent import protocol as p
from slurm_resil.agent.ballot import Ballot
from slurm_resil.agent.desk import Desk, Rank
from slurm_resil.agent.events import LeaderEvent
from slurm_resil.agent.leader import Leader
from slurm_resil.agent.setup import AgentConfig, prepare
from slurm_resil.agent.signals import GraceSignals
from slurm_resil.agent.store import Store
from slurm_resil.agent.uplink import LeaderPlace, Uplink
from slurm_resil.comm.channel import Channel, ChannelClosedError, ChannelTimeoutError
from slurm_resil.comm.unix import UnixServer
from slurm_resil.core import control as c
from slurm_resil.core import faults, paths
from slurm_resil.core.errors import DataError, ResilError
from slurm_resil.core.log import event
from slurm_resil.core.model import Notice

BEAT_S = 1.0
WATCH_S = 2.0  # between looks at the deadline, when this agent hosts the leader
IDLE_S = 120.0  # without a rank and without a leader
LINGER_S = 0.3  # after the last rank has left
LAST_S = 15.0  # the host of the leader waits for the other agents
RATE_BEATS = 5
log = logging.getLogger(__name__)


class Agent:
    """See the module.

    Args:
        config: What it has to know.
        store: Burst buffer.
        watch: For a leader of our own: looks at the job's deadline (it may take its time) and returns notices.
    """

    def __init__(self, config: AgentConfig, store: Store, *, watch: Callable[[], list[Notice]] | None = None) -> None:
        self._config, self._watch = config, watch
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.signals = GraceSignals()
        self._desk = Desk(
            config.job_dir,
            config.info.run_id,
            config.ranks,
            config.slots,
            store,
            tell=self._tell,
            later=self._inbox.put,
        )
        self._page: c.ControlPage | None = None
        self._ballot: Ballot | None = None
        self._leader: Leader | None = None
        self._channel: Channel | None = None
        self._plan: p.Plan | None = None
        self._number = 0  # of the newest plan
        self._going = False
        self._survey_due = False
        self._early: list[tuple[Channel, p.RankHello]] = []
        self._notice: Notice | None = None
        self._beats: deque[tuple[float, int]] = deque(maxlen=RATE_BEATS)
        self._next_beat = 0.0
        self._ending = threading.Event()
        self._goodbye = False
        self._refused = ""
        self._served = False
        self._quiet_since = time.monotonic()

    # life

    def run(self) -> int:
        """Serve until the ranks are done and nobody needs the agent any more; returns the exit code."""
        config = self._config
        prepare(config.job_dir, config.info, run_dir=config.run_dir, node=config.node)
        self._take_over()
        server = UnixServer(paths.agent_socket(config.job_dir), self._serve)
        uplink = Uplink(
            self._dial(),
            opened=lambda channel: self._inbox.put(lambda: self._opened(channel)),
            heard=lambda message: self._inbox.put(lambda: self._hear_leader(message)),
            closed=lambda: self._inbox.put(self._closed),
        )
        uplink.start()
        event(log, "agent_up", node=config.node, node_rank=config.node_rank, ranks=list(config.ranks))
        try:
            while not self._done(time.monotonic()):
                self._turn()
            self._tell(p.Bye())
            self._await_others()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(paths.control(config.job_dir))  # nobody is left who looks at it
        finally:
            self._ending.set()
            server.close()
            self._desk.close()
            uplink.close()
            if self._leader is not None:
                self._leader.close()
        event(log, "agent_down", refused=self._refused)
        return 1 if self._refused else 0

    def _dial(self) -> Callable[[], Channel]:
        config = self._config
        if config.leader is None and config.node_rank == 0:
            self._leader = Leader(
                info=config.info,
                nodes=config.nodes,
                ranks_per_node=config.ranks_per_node,
                run_dir=config.run_dir,
                host=config.host if len(config.nodes) > 1 else None,
                interval_s=config.interval_s,
            )
            if self._watch is not None:
                arguments = (self._leader, self._watch)
                threading.Thread(target=self._watch_deadline, args=arguments, name="watch", daemon=True).start()
            return self._leader.attach
        info = config.info
        return LeaderPlace(
            run_dir=config.run_dir, job_id=info.job_id, attempt=info.attempt, address=config.leader
        ).connect

    def _turn(self) -> None:
        with contextlib.suppress(queue.Empty):
            call = self._inbox.get(timeout=0.01 if self._desk.leases_wait else 0.05)
            call()
        now = time.monotonic()
        if self._desk.leases_wait:
            self._desk.serve_leases(now)
        if self._ballot is not None:
            self._ballot.tidy()
        if self._survey_due and not self._desk.sealing:
            self._survey_due = False
            desk = self._desk
            self._tell(desk.survey(self._config.info.world_size))
        notice = self.signals.poll(now)
        if notice is not None:
            event(log, "grace_signal", source=notice.source, kind=str(notice.kind))
            self._notice = notice
            self._tell_notice()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._beat(now)
        self._host()

    def _host(self) -> None:
        """Say what the leader of our own says."""
        leader = self._leader
        if leader is None:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                self._log_event(leader.events.get_nowait())

    def _watch_deadline(self, leader: Leader, watch: Callable[[], list[Notice]]) -> None:
        """Thread: looking may take seconds, and a heartbeat must not wait for it."""
        while not self._ending.wait(WATCH_S):
            try:
                for notice in watch():
                    leader.notice(notice)
            except ResilError as error:
                event(log, "watch_failed", level=logging.WARNING, why=str(error))

    @staticmethod
    def _log_event(happened: LeaderEvent) -> None:
        event(log, type(happened).__name__, **vars(happened))

    def _done(self, now: float) -> bool:
        if self._refused:
            return True
        present = any(rank.channel is not None for rank in self._desk.ranks.values()) or bool(self._early)
        led = self._config.leader is not None and self._channel is not None
        if present or self._desk.sealing or (led and not self._goodbye):
            self._quiet_since = now
            return False
        if self._goodbye:
            return True
        if self._config.leader is not None:
            return now > self._quiet_since + IDLE_S
        return now > self._quiet_since + (LINGER_S if self._served else IDLE_S)

    def _await_others(self) -> None:
        """Keep the leader up until the other agents have heard everything."""
        deadline = time.monotonic() + LAST_S
        while self._leader is not None and self._leader.connected and time.monotonic() < deadline:
            self._host()
            time.sleep(0.02)

    # the leader

    def _tell(self, message: p.Message) -> None:
        if self._channel is not None:
            with contextlib.suppress(ChannelClosedError):  # the uplink reports that, and it is said again later
                self._channel.send(p.to_wire(message), timeout_s=2.0)

    def _opened(self, channel: Channel) -> None:
        self._channel = channel
        config, ballot = self._config, self._ballot
        self._tell(
            p.Hello(
                node=config.node,
                node_rank=config.node_rank,
                job_id=config.info.job_id,
                attempt=config.info.attempt,
                pid=os.getpid(),
                cycle=self._desk.cycle,
                plan=self._number,
                going=self._going,
                epoch=ballot.epoch if ballot is not None else 0,
                voted=ballot.voted if ballot is not None else 0,
                sealed_all=self._desk.sealed_all,
            )
        )
        for rank in self._desk.ranks.values():
            if rank.outcome is not None:
                self._tell(rank.outcome)
            for result in rank.results.values():
                self._tell(result)
        self._tell_notice()

    def _closed(self) -> None:
        self._channel = None

    def _tell_notice(self) -> None:
        notice = self._notice
        if notice is not None:
            self._tell(
                p.Noticed(kind=str(notice.kind), stop=notice.stop, deadline_s=notice.deadline_s, source=notice.source)
            )

    def _beat(self, now: float) -> None:
        page, ballot = self._page, self._ballot
        if page is None or ballot is None:
            self._tell(p.Beat(newest=0, oldest=0, rate=0.0))
            return
        page.words[c.AGENT_BEAT] = int(now * 1000)
        newest = ballot.newest
        rates = [(newest - before) / (now - at) for at, before in self._beats if before and now > at]
        self._beats.append((now, newest))
        self._tell(p.Beat(newest=newest, oldest=ballot.oldest, rate=max(rates, default=0.0)))

    def _hear_leader(self, message: p.Message) -> None:
        ballot = self._ballot
        match message:
            case p.Cycle():
                self._begin(message.cycle)
                self._desk.lost(message.lost)
            case p.Refused():
                event(log, "refused", level=logging.ERROR, why=message.reason)
                self._refused = message.reason
            case p.Plan() if message.cycle == self._desk.cycle:
                self._heard_plan(message)
            case p.Go():
                self._go(message.plan)
            case p.Propose() if ballot is not None:
                vote = ballot.consider(message)
                faults.point("agent.before_vote")
                self._tell(vote)
                faults.point("agent.after_vote")
            case p.Decide() if ballot is not None:
                faults.point("agent.before_decide")
                ballot.decide(message)
                faults.point("agent.after_decide")
            case p.SealedAll() if ballot is not None:
                self._desk.all_sealed(message.iteration)
                ballot.sealed_all(message.iteration)
            case p.Abandon() if ballot is not None:
                self._desk.keeping.given_up.add(message.iteration)
                ballot.abandon(message.iteration)
            case p.Deadline() if ballot is not None:
                ballot.deadline(message.deadline_s)
            case p.Protected() if ballot is not None:
                self._desk.keeping.is_protected(message.iteration)
                ballot.safe(protected=message.iteration)
            case p.Unprotected():
                self._desk.keeping.is_unprotected(message.iteration)
            case p.Durable() if ballot is not None:
                event(log, "durable", iteration=message.iteration)
                self._desk.keeping.is_durable(message.iteration)
                ballot.safe(durable=message.iteration)
            case p.Goodbye():
                self._goodbye = True
            case _:
                pass

    def _begin(self, cycle: int) -> None:
        if cycle == self._desk.cycle:
            self._survey_due = not self._going
            return
        self._plan, self._going, self._served = None, False, False
        self._beats.clear()
        self._desk.begin(cycle)
        self._survey_due = True
        page = c.ControlPage.create(paths.control(self._config.job_dir), self._config.ranks_per_node)
        page.words[c.ATTEMPT], page.words[c.CYCLE] = self._config.info.attempt + 1, cycle + 1
        self._page, self._ballot = page, Ballot(page)
        for channel, hello in self._early:
            self._inbox.put(lambda channel=channel, hello=hello: self._hello(channel, hello))  # type: ignore[misc] # bound now
        self._early.clear()

    def _take_over(self) -> None:
        """Go on where an agent of this attempt before this one ended: the ranks still look at its page."""
        config = self._config
        try:
            page = c.ControlPage.open(paths.control(config.job_dir))
        except (FileNotFoundError, DataError):
            return
        words = page.words
        ours = (words[c.ATTEMPT], page.ranks) == (config.info.attempt + 1, config.ranks_per_node)
        if not ours or not words[c.GOING] or not page.occupied:
            page.close()  # of another attempt, or no ranks train by it: a fresh one is as good
            return
        self._page, self._ballot = page, Ballot(page)
        self._ballot.take_over()
        self._desk.take_over(words, config.info)
        self._going, self._number = True, words[c.GOING]
        event(log, "page_taken_over", epoch=words[c.EPOCH], sealed_all=words[c.SEALED_ALL], cycle=words[c.CYCLE] - 1)

    def _heard_plan(self, plan: p.Plan) -> None:
        if self._going or plan.number <= self._number:
            return
        self._plan, self._number = plan, plan.number
        self._desk.plan(plan)
        if self._ballot is not None:
            self._ballot.sealed_all(plan.complete)
            self._ballot.safe(protected=plan.protected, durable=plan.durable)
        for rank in self._desk.ranks.values():
            rank.outcome = None
            self._tell_restore(rank)

    def _tell_restore(self, rank: Rank) -> None:
        plan = self._plan
        if plan is not None:
            rank.send(
                p.Restore(
                    plan=plan.number,
                    iteration=plan.iteration,
                    source=plan.sources[rank.rank],
                    error=plan.error,
                    final=plan.final,
                )
            )

    def _go(self, number: int) -> None:
        if self._going:
            return
        self._going = True
        self._survey_due = False
        if self._page is not None:
            self._page.words[c.GOING] = number
        if self._plan is not None and self._plan.number == number:
            self._desk.continue_from(self._plan.iteration)
        for rank in self._desk.ranks.values():
            rank.send(p.Start(plan=number))

    # ranks

    def _serve(self, channel: Channel) -> None:
        """Thread of a rank's connection."""
        try:
            while True:
                with contextlib.suppress(ChannelTimeoutError):
                    message = p.from_wire(channel.recv(timeout_s=60))
                    self._inbox.put(lambda message=message: self._hear_rank(channel, message))  # type: ignore[misc] # bound now
        except ChannelClosedError:
            pass
        except DataError as error:
            event(log, "bad_message", level=logging.ERROR, peer=channel.peer, why=str(error))
        finally:
            self._inbox.put(lambda: self._rank_gone(channel))

    def _hear_rank(self, channel: Channel, message: p.Message) -> None:
        if isinstance(message, p.RankHello):
            self._hello(channel, message)
            return
        rank = self._desk.find(channel)
        if rank is None:
            return
        if isinstance(message, p.RankLoaded):
            rank.outcome = p.Loaded(plan=message.plan, rank=rank.rank, outcome=message.outcome, reason=message.reason)
            self._tell(rank.outcome)
            return
        self._desk.hear(rank, message, time.monotonic())

    def _hello(self, channel: Channel, hello: p.RankHello) -> None:
        config, info = self._config, self._config.info
        why = ""
        expected = (info.run_id, info.attempt, info.world_size, config.ranks.start + hello.local_rank)
        if (hello.run_id, hello.attempt, hello.world_size, hello.rank) != expected or hello.rank not in config.ranks:
            why = f"rank {hello.rank} of run {hello.run_id} attempt {hello.attempt} is not of this agent: {expected}"
        elif hello.cycle < self._desk.cycle:
            why = f"cycle {hello.cycle} is over"
        elif hello.cycle > self._desk.cycle:
            self._early.append((channel, hello))
            if self._leader is not None:
                self._leader.start_cycle(hello.cycle)
            return
        rank = self._desk.ranks.get(hello.rank)
        if not why and self._going and not hello.again:
            # it would be told to start, from nothing that it has
            why = f"cycle {hello.cycle} trains already, and this process has restored nothing"
        if not why and self._going and self._page is not None:
            trains = self._page.words[self._page.block(hello.local_rank) + c.PID]
            if trains not in (0, hello.pid):
                why = f"in cycle {hello.cycle} rank {hello.rank} is pid {trains}"
        if why or rank is None:
            channel_refuse(channel, why)
            return
        rank.channel, rank.left = channel, False
        self._served = True
        rank.send(p.Page(path=paths.control(config.job_dir), slots=config.slots))
        self._tell_restore(rank)
        if self._going:
            rank.send(p.Start(plan=self._number))

    def _rank_gone(self, channel: Channel) -> None:
        self._early = [entry for entry in self._early if entry[0] is not channel]
        rank = self._desk.find(channel)
        if rank is not None:
            self._desk.gone(rank)


def channel_refuse(channel: Channel, why: str) -> None:
    """Send a rank away."""
    event(log, "rank_refused", level=logging.WARNING, peer=channel.peer, why=why)
    with contextlib.suppress(ChannelClosedError):
        channel.send(p.to_wire(p.Refuse(reason=why)))


def main_agent(config: AgentConfig, store: Store, *, watch: Callable[[], list[Notice]] | None = None) -> int:
    """Run an agent in this process (main thread) until it is done; returns the exit code.

    The command ``slurm-resil agent`` (slurm_resil.cli.agent) builds the configuration from the environment, brings the
    store along and calls this; nothing else has to.

    Args:
        config: See AgentConfig.
        store: Burst buffer of the node.
        watch: See Agent.
    """
    agent = Agent(config, store, watch=watch)
    agent.signals.install()
    return agent.run()
