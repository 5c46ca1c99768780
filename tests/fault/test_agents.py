"""Processes are killed at named points: committed everywhere, aborted everywhere, or given up in time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Nodes, wait_for

from slurm_resil.core import fsio, paths

PACE = 0.004
FOREVER = 1_000_000


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    try:
        yield made
    except BaseException:
        print(made.logs())
        raise
    finally:
        print(made.logs())
        made.close()


def saved_by_all(nodes: Nodes) -> list[int]:
    """Iterations that every rank has saved; no rank saved one that others did not, but for the very last."""
    by_rank = nodes.said("saved")
    return sorted(set.intersection(*(set(saved) for saved in by_rank.values())))


def stop(nodes: Nodes, timeout_s: float = 20.0) -> int:
    """Stop the training; everything ends in order, and all ranks at the same iteration. Returns it."""
    nodes.leader.tell(f"stop {timeout_s}")
    reached = nodes.event("StopReached", timeout_s + 10)
    assert nodes.wait_ranks(timeout_s) == [0] * nodes.info.world_size
    stopped = {one for stops in nodes.said("stopped").values() for one in stops}
    assert len(stopped) == 1, nodes.said("stopped")
    nodes.leader.tell("goodbye")
    for agent in nodes.agents.values():
        assert agent.wait(15) == 0
    if reached["saved"]:
        assert {reached["iteration"]} == stopped
    assert nodes.complete() == reached["iteration"]
    digests = nodes.said("digest")
    assert all(len(one) for one in digests.values())
    return int(reached["iteration"])


def test_checkpoint_stop_and_resume_at_the_same_bytes(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(iterations=FOREVER, pace_s=PACE)
    assert nodes.event("Restored")["iteration"] == 0
    nodes.train_to(20)
    nodes.leader.tell("checkpoint")
    first = nodes.event("SealedAll")["iteration"]
    last = stop(nodes)
    assert last > first
    assert nodes.said("saved") == {key: [first, last] for key in range(4)}
    ends = {rank: said[-1] for rank, said in nodes.said("digest").items()}
    nodes.close()
    again = Nodes(tmp_path, attempt=1)
    try:
        again.start(iterations=last + 30, pace_s=PACE)
        assert again.event("Restored")["iteration"] == last
        assert again.wait_ranks() == [0] * 4
        assert again.said("start") == {key: [last] for key in range(4)}
        assert {rank: said[0] for rank, said in again.said("digest").items()} == ends
        assert all(said == [[["local", last]]] for said in again.said("loaded").values())
    finally:
        again.close()


def test_the_cadence_needs_no_agreement(nodes: Nodes) -> None:
    nodes.start(iterations=60, pace_s=0.02, every=20)
    assert nodes.wait_ranks() == [0] * 4
    assert nodes.said("saved") == {key: [20, 40, 60] for key in range(4)}
    assert nodes.event("SealedAll", count=3)["iteration"] == 60
    assert nodes.complete() == 60


AGENT_POINTS = [
    "agent.prepare",
    "agent.proposed",
    "agent.before_vote",
    "agent.after_vote",
    "agent.before_decide",
    "agent.after_decide",
    "agent.seal",
    "store.seal",
    "store.published",
    "agent.sealed",
]


@pytest.mark.parametrize("point", AGENT_POINTS)
def test_an_agent_is_killed_and_started_again(nodes: Nodes, point: str) -> None:
    nodes.start({"agent1": f"{point}:kill"}, iterations=FOREVER, pace_s=PACE)
    nodes.event("Restored")
    nodes.train_to(10)
    nodes.leader.tell("checkpoint")
    assert nodes.agents[1].wait(15) == -signal.SIGKILL
    nodes.start_agent(1)
    # the leader goes on asking until there is a checkpoint
    sealed = nodes.event("SealedAll", 30)["iteration"]
    assert nodes.sealed()[sealed] == {0, 1, 2, 3}
    last = stop(nodes)
    assert last > sealed
    assert nodes.said("error") == {key: [] for key in range(4)}
    assert nodes.said("stuck") == {key: [] for key in range(4)}


@pytest.mark.parametrize("point", ["leader.propose", "leader.vote", "leader.before_record", "leader.after_record"])
def test_the_leader_is_killed_and_another_takes_over(nodes: Nodes, point: str) -> None:
    nodes.start({"leader": f"{point}:kill"}, iterations=FOREVER, pace_s=PACE)
    nodes.event("Restored")
    nodes.train_to(10)
    nodes.leader.tell("checkpoint")
    assert nodes.leader.wait(15) == -signal.SIGKILL
    at = nodes.iteration()
    nodes.start_leader()
    for place in range(2):
        nodes.event("NodeJoined", 15, count=place + 1)
    nodes.leader.tell("checkpoint")
    sealed = nodes.event("SealedAll", 30)["iteration"]
    assert nodes.sealed()[sealed] == {0, 1, 2, 3}
    wait_for("training to go on", lambda: nodes.iteration() > max(at, sealed) + 10)
    stop(nodes)
    # what was open was aborted, what was recorded was kept: nobody saved alone
    assert len({tuple(saved) for saved in nodes.said("saved").values()}) == 1


class Relay:
    """The network between agents and leader: can be cut (connections break) or silent (nothing gets through)."""

    def __init__(self, target: str) -> None:
        host, port = target.split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._through = threading.Event()
        self._through.set()
        self._up = True
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._up = False
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        self._up = True
        self._through.set()

    def silence(self) -> None:
        self._through.clear()

    def close(self) -> None:
        self._listener.close()
        self.heal()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            if not self._up:
                here.close()
                continue
            there = socket.create_connection(self._target)
            self._open += [here, there]
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with source:
            try:
                while data := source.recv(4096):
                    self._through.wait()
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


@pytest.fixture
def relayed(nodes: Nodes) -> Iterator[Relay]:
    """A run whose agents reach the leader through a relay."""
    nodes.start_leader()
    record = paths.leader(str(nodes.run_dir))
    document = fsio.read_json(record)
    relay = Relay(document["address"])
    fsio.write_json(record, {**document, "address": relay.address})
    for place in range(2):
        nodes.start_agent(place)
    for rank in range(4):
        nodes.start_rank(rank, iterations=FOREVER, pace_s=PACE)
    nodes.event("Restored")
    nodes.train_to(10)
    yield relay
    relay.close()


def test_a_cut_connection_comes_back_and_nothing_is_lost(nodes: Nodes, relayed: Relay) -> None:
    for _ in range(5):
        nodes.leader.tell("checkpoint")
        relayed.cut()
        at = nodes.iteration()
        wait_for("training goes on without a leader", lambda at=at: nodes.iteration() > at + 20)
        relayed.heal()
    nodes.event("SealedAll", 30)
    assert not [line for line in nodes.leader.lines if line["event"] == "NodeLost"]
    stop(nodes)
    assert len({tuple(saved) for saved in nodes.said("saved").values()}) == 1


def test_a_silent_network_is_noticed_without_a_reset(nodes: Nodes, relayed: Relay) -> None:
    relayed.silence()
    began = time.monotonic()
    lost = [nodes.event("NodeLost", 12, count=one) for one in (1, 2)]
    assert {one["node"] for one in lost} == {"node0", "node1"}
    assert "silent" in lost[0]["why"]
    assert time.monotonic() - began < 9
    at = nodes.iteration()
    wait_for("training goes on", lambda: nodes.iteration() > at + 20)
    relayed.heal()
    for count in (3, 4):
        nodes.event("NodeJoined", 25, count=count)
    nodes.leader.tell("checkpoint")
    nodes.event("SealedAll", 30)
    stop(nodes)


def test_a_dead_node_is_noticed_at_once(nodes: Nodes) -> None:
    nodes.start(iterations=FOREVER, pace_s=PACE)
    nodes.event("Restored")
    nodes.agents[1].kill()
    began = time.monotonic()
    assert nodes.event("NodeLost", 10)["node"] == "node1"
    assert time.monotonic() - began < 4


def test_a_stopped_agent_makes_no_rank_wait_for_ever(nodes: Nodes) -> None:
    nodes.start(iterations=FOREVER, pace_s=PACE)
    nodes.event("Restored")
    nodes.train_to(10)
    nodes.agents[1].signal(signal.SIGSTOP)
    nodes.leader.tell("checkpoint")
    nodes.event("NodeLost", 12)
    at = nodes.iteration()
    wait_for("training goes on", lambda: nodes.iteration() > at + 20, 40)
    nodes.agents[1].signal(signal.SIGCONT)
    nodes.event("SealedAll", 30)
    stop(nodes)


def test_a_rank_that_dies_on_the_way_fails_the_checkpoint_and_the_old_one_stands(nodes: Nodes) -> None:
    nodes.start_leader()
    for place in range(nodes.count):
        nodes.start_agent(place)
    for rank in range(4):  # the one that dies is the last to come: the others would have nothing to save after it
        fault, pace = ("rank.write:kill@2", 4 * PACE) if rank == 3 else ("", PACE)
        nodes.start_rank(rank, fault=fault, iterations=FOREVER, pace_s=pace)
    nodes.event("Restored")
    nodes.train_to(10)
    nodes.leader.tell("checkpoint")
    first = nodes.event("SealedAll")["iteration"]
    nodes.leader.tell("checkpoint")
    failed = nodes.event("SaveFailed", 20)
    assert "rank 3" in failed["why"]
    assert nodes.ranks[3].wait() == -signal.SIGKILL
    wait_for("the others' seals", lambda: nodes.sealed().get(failed["iteration"]) == {0, 1, 2})
    assert nodes.complete() == first
    # the launcher kills the rest and starts the next cycle: from what all have, and what is newer is forgotten
    for rank in range(3):
        nodes.ranks[rank].kill()
    nodes.leader.tell("cycle 1")
    for rank in range(4):
        nodes.start_rank(rank, cycle=1, iterations=FOREVER, pace_s=PACE)
    again = nodes.event("Restored", count=2)
    assert (again["cycle"], again["iteration"]) == (1, first)
    wait_for("what is newer to be forgotten", lambda: set(nodes.sealed()) == {first})
    nodes.train_to(failed["iteration"] + 5)
    stop(nodes)


@pytest.mark.parametrize("where", ["rank.write", "store.seal"])
def test_a_full_burst_buffer_fails_one_save_and_training_goes_on(nodes: Nodes, where: str) -> None:
    who = "rank2" if where.startswith("rank") else "agent1"
    nodes.start({who: f"{where}:raise"}, iterations=FOREVER, pace_s=PACE)
    nodes.event("Restored")
    nodes.train_to(10)
    nodes.leader.tell("checkpoint")
    failed = nodes.event("SaveFailed")
    assert "No space left" in failed["why"] or "injected" in failed["why"]
    nodes.leader.tell("checkpoint")
    sealed = nodes.event("SealedAll")["iteration"]
    assert sealed > failed["iteration"]
    stop(nodes)
    errors = [one for said in nodes.said("error").values() for one in said]
    assert len(errors) == 1
    assert f"iteration {failed['iteration']}" in errors[0]


def test_a_stop_that_cannot_be_saved_ends_with_the_checkpoint_before(nodes: Nodes) -> None:
    nodes.start({"rank2": "rank.write:raise@2"}, iterations=FOREVER, pace_s=PACE)
    nodes.event("Restored")
    nodes.train_to(10)
    nodes.leader.tell("checkpoint")
    first = nodes.event("SealedAll")["iteration"]
    nodes.leader.tell("stop 20")
    reached = nodes.event("StopReached", 15)
    assert (reached["iteration"], reached["saved"]) == (first, False)
    assert nodes.wait_ranks(10) == [0] * 4
    assert nodes.complete() == first


def flip(nodes: Nodes, rank: int, iteration: int) -> None:
    """Flip a bit of a rank's shard."""
    from slurm_resil.format.manifest import ShardManifest

    job = nodes.job_dir(rank // nodes.per_node)
    manifest = ShardManifest.load(paths.manifest(job, iteration, rank))
    slot = Path(job, "slots", manifest.slot)
    data = bytearray(slot.read_bytes())
    data[1000] ^= 4
    slot.write_bytes(data)


def test_a_bad_shard_sends_all_ranks_back_to_the_one_before(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(iterations=40, pace_s=0.02, every=20)
    assert nodes.wait_ranks() == [0] * 4
    nodes.event("SealedAll", count=2)
    nodes.close()
    flip(nodes, 2, 40)
    for attempt in (1, 2):
        again = Nodes(tmp_path, attempt=attempt)
        try:
            again.start(iterations=21, pace_s=PACE)
            assert again.event("Restored")["iteration"] == 20
            assert again.wait_ranks() == [0] * 4
            assert again.said("start") == {key: [20] for key in range(4)}
            # the bad one is tried once, by the first attempt, and never again
            tried = [["local", 40], ["local", 20]] if attempt == 1 else [["local", 20]]
            assert again.said("loaded")[2] == [tried]
        finally:
            again.close()


def test_a_lost_burst_buffer_is_restored_from_the_drained_file(nodes: Nodes, tmp_path: Path) -> None:
    import shutil

    nodes.start(iterations=40, pace_s=0.02, every=20)
    assert nodes.wait_ranks() == [0] * 4
    nodes.event("SealedAll", count=2)
    ends = {rank: said[0] for rank, said in nodes.said("digest").items()}  # of iteration 20
    nodes.close()
    drain(nodes, 20)
    shutil.rmtree(nodes.job_dir(1))
    saved = {
        rank: next(line["digest"] for line in process.lines if line.get("saved") == 20)
        for rank, process in nodes.ranks.items()
    }
    again = Nodes(tmp_path, attempt=1)
    try:
        again.start(iterations=21, pace_s=PACE)
        assert again.event("Restored")["iteration"] == 20
        assert again.wait_ranks() == [0] * 4
        assert again.said("loaded") == {
            0: [[["local", 20]]],
            1: [[["local", 20]]],
            2: [[["drained", 20]]],
            3: [[["drained", 20]]],
        }
        assert {rank: said[0] for rank, said in again.said("digest").items()} == saved
        assert ends.keys() == saved.keys()
    finally:
        again.close()


def test_saves_go_on_after_the_loss_of_a_node_though_no_iteration_is_everywhere(nodes: Nodes, tmp_path: Path) -> None:
    """All slots of the nodes that stayed are full, and nothing in them is on the new one."""
    import shutil

    nodes.start(iterations=60, pace_s=0.02, every=20)
    assert nodes.wait_ranks() == [0] * 4
    nodes.event("SealedAll", count=3)
    nodes.close()
    drain(nodes, 60)
    shutil.rmtree(nodes.job_dir(1))
    again = Nodes(tmp_path, attempt=1)
    try:
        again.start(iterations=140, pace_s=0.02, every=20)
        assert again.event("Restored")["iteration"] == 60
        assert again.wait_ranks() == [0] * 4
        assert [again.event("SealedAll", count=number)["iteration"] for number in (1, 2, 3, 4)] == [80, 100, 120, 140]
    finally:
        again.close()


def drain(nodes: Nodes, iteration: int) -> None:
    """What a mover would have left, in the way of raw.py."""
    from slurm_resil.format.manifest import ShardManifest

    files, hashes = [], []
    for rank in range(nodes.info.world_size):
        job = nodes.job_dir(rank // nodes.per_node)
        manifest = ShardManifest.load(paths.manifest(job, iteration, rank))
        target = nodes.run_dir / f"drained-{iteration}-{rank}"
        target.write_bytes(Path(job, "slots", manifest.slot).read_bytes())
        files.append(str(target))
        hashes.append(manifest.items[0].xxh3)
    fsio.write_json(
        paths.drained_manifest(str(nodes.run_dir), iteration), {"attempt": 0, "files": files, "xxh3": hashes}
    )


def test_signals_of_a_grace_period_stop_the_run_and_not_the_agent(nodes: Nodes) -> None:
    nodes.start(iterations=FOREVER, pace_s=PACE)
    nodes.event("Restored")
    nodes.train_to(10)
    for agent in nodes.agents.values():  # every node gets them
        agent.signal(signal.SIGTERM)
        agent.signal(signal.SIGCONT)
    notice = nodes.event("NoticeSeen")["notice"]
    assert (notice["kind"], notice["stop"]) == ("preemption", True)
    reached = nodes.event("StopReached", 15)
    assert nodes.wait_ranks() == [0] * 4
    assert nodes.complete() == reached["iteration"]
    assert all(agent.running for agent in nodes.agents.values())
    assert len([line for line in nodes.leader.lines if line["event"] == "NoticeSeen"]) == 1
    nodes.leader.tell("goodbye")
    assert [agent.wait(10) for agent in nodes.agents.values()] == [0, 0]


def test_a_late_agent_of_another_place_or_attempt_is_ignored(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(iterations=FOREVER, pace_s=PACE)
    nodes.event("Restored")
    stranger = Nodes(tmp_path / "other", attempt=3)
    stranger.run_dir.rmdir()
    os.symlink(nodes.run_dir, stranger.run_dir)
    spare = Nodes(tmp_path / "spare")
    spare.run_dir.rmdir()
    os.symlink(nodes.run_dir, spare.run_dir)
    spare.names = ["spare", "node1"]
    try:
        spare.start_agent(0)
        assert spare.agents[0].wait(15) == 1
        assert "place 0 is that of node node0" in spare.logs()
        nodes.leader.tell("checkpoint")
        nodes.event("SealedAll")
        stop(nodes)
    finally:
        spare.close()
        stranger.close()
