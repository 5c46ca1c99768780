"""Where everything of a run lies: on a node's burst buffer and on the parallel file system.

Hooks, ranks, agents, movers and the launcher all name files through this module, so that none of them guesses.

Burst buffer, one directory per job and node, mode 0700, owner: the job's user::

    <bb_root>/job-<job id>/
        run.json                         which run, job, attempt and node this is, and where the run's directory is
        slots/<rank>-<k>.h5              preallocated slots
        described/<rank>-<k>.json        what a slot holds, from one layout to the next, see format.draft
        described/layout-<rank>-<k>.json how a slot is laid out; wanted-<rank>.json: how it should be, see ckpt.slotfile
        manifests/<iteration>-<rank>.json   sealed shards; presence means valid
        redundancy/<iteration>-<node_rank>.json   this node's part of an encode; presence means it came to its end
        redundancy/<iteration>-<node_rank>.bin    parity or copies of other nodes' shards that this node holds
        redundancy/.<...>.bin.spare               one that is written over by the next encode, see core.spare
        durable/<iteration>.json         written by the mover once the PFS file is published
        fetched/ckpt-<iteration>.h5      staged copy of a drained file, or of the blocks of it that this node needs
        fetched/ckpt-<iteration>.json    which blocks of it are there, published last; see format.staged
        fetched/waiting                  a rank waits for the fetch that is at work
        pins/<iteration>                 lock of whoever reads the shards of that iteration, see core.pins
        continue.json                    the run goes on under this job id: the epilog keeps everything
        control                          control page, see core.control
        agent.sock                       the agent's Unix socket
        agent.log
        late.lock                        lock of the late drain that is at work on this node, see drain.late
        late.log                         what it said

Parallel file system, one directory per run::

    <prefix_root>/<run id>/
        ckpt-<iteration>.h5              drained checkpoint, published by rename
        ckpt-<iteration>.json            its manifest, published last: presence means durable
        ckpt-<iteration>.bad             manifest of a drained checkpoint that did not verify: never tried again
        ckpt-<iteration>.keep            a person wants this one kept, whatever the retention says
        ckpt-<iteration>.dropped         why a checkpoint of a job that is gone did not become durable, see drain.late
        .ckpt-<iteration>.h5.part        a drain that has not come to its end
        .ckpt-<iteration>.h5.journal     what of it is on storage, see drain.part
        drain-orders.json                what is ordered of the drain that runs, see drain.orders
        drain-status.json                how far it is, see launch.draining
        decisions/<epoch>.json           the leader's commits and aborts, written before they are told
        costs.json                       measured times of saves and drains
        leader.json                      address of the leader, rewritten by each attempt and cycle
        layout.json                      which node holds which node_rank
        sets.json                        which nodes protect each other
        attempts/<attempt>.json          requeue intents and outcomes
        late/<job id>-<attempt>/         what nodes tell each other in a late drain, see drain.heads
"""

from __future__ import annotations

import os
import re
import zlib

_ITERATION = re.compile(r"^ckpt-(\d{10,19})\.json$")
_OF_DRAINED = re.compile(r"^\.?ckpt-(\d{10,19})\.(.+)$")
_MANIFEST = re.compile(r"^(\d{10,19})-(\d{6,10})\.json$")
_MEMBER = re.compile(r"^(\d{10,19})-(\d{6,10})\.(json|bin)$")
_DURABLE = re.compile(r"^(\d{10,19})\.json$")


def job_dir(bb_root: str, job_id: int) -> str:
    """Burst buffer directory of a job on this node."""
    return os.path.join(bb_root, f"job-{int(job_id)}")


def slot(job: str, rank: int, index: int) -> str:
    """Slot file ``index`` of a rank."""
    return os.path.join(job, "slots", f"{rank}-{index}.h5")


def described(job: str, slot_name: str) -> str:
    """What the slot with this file name holds."""
    return os.path.join(job, "described", f"{os.path.splitext(os.path.basename(slot_name))[0]}.json")


def manifest(job: str, iteration: int, rank: int) -> str:
    """Manifest of a sealed shard."""
    return os.path.join(job, "manifests", f"{iteration:010d}-{rank:06d}.json")


def parse_manifest(name: str) -> tuple[int, int] | None:
    """``(iteration, rank)`` of a manifest's file name, or None if it is no manifest."""
    match = _MANIFEST.match(name)
    return (int(match[1]), int(match[2])) if match else None


def redundancy(job: str) -> str:
    """Directory of what this node holds to protect others."""
    return os.path.join(job, "redundancy")


def member(job: str, iteration: int, node_rank: int) -> str:
    """Manifest of this node's part of an encode."""
    return os.path.join(redundancy(job), f"{iteration:010d}-{node_rank:06d}.json")


def parity(job: str, iteration: int, node_rank: int) -> str:
    """Parity or copies that this node holds."""
    return os.path.join(redundancy(job), f"{iteration:010d}-{node_rank:06d}.bin")


def parse_member(name: str) -> tuple[int, int, str] | None:
    """``(iteration, node_rank, "json" or "bin")`` of a file of :func:`redundancy`, or None if it is none."""
    match = _MEMBER.match(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def durable(job: str, iteration: int) -> str:
    """Mark on the burst buffer that the checkpoint is durable."""
    return os.path.join(job, "durable", f"{iteration:010d}.json")


def parse_durable(name: str) -> int | None:
    """Iteration of a durable mark's file name."""
    match = _DURABLE.match(name)
    return int(match[1]) if match else None


def fetched(job: str) -> str:
    """Directory of staged copies of drained files."""
    return os.path.join(job, "fetched")


def staged(job: str, iteration: int) -> str:
    """Staged copy of a drained file."""
    return drained(fetched(job), iteration)


def staged_manifest(job: str, iteration: int) -> str:
    """Which blocks of a drained file are staged."""
    return drained_manifest(fetched(job), iteration)


def fetch_waited_for(job: str) -> str:
    """Mark of a rank that waits for the fetch that is at work."""
    return os.path.join(fetched(job), "waiting")


def run_info(job: str) -> str:
    """Which run the job's burst buffer directory belongs to."""
    return os.path.join(job, "run.json")


def pin(job: str, iteration: int) -> str:
    """Lock of whoever reads the shards of an iteration, see :mod:`slurm_resil.core.pins`."""
    return os.path.join(job, "pins", f"{iteration:010d}")


def continues(job: str) -> str:
    """Mark that the run goes on under the same job id."""
    return os.path.join(job, "continue.json")


def control(job: str) -> str:
    """Control page of the node."""
    return os.path.join(job, "control")


def agent_socket(job: str) -> str:
    """Unix socket of the agent. A Unix socket's path is limited to 107 bytes; callers check it."""
    return os.path.join(job, "agent.sock")


RUN_ID_BYTES = 200  # of a file's name, which has 255


def local_job(prefix_root: str, run_id: str) -> int:
    """Number that stands for a job outside Slurm: the same for every start of a run, and for no other run."""
    return zlib.crc32(f"{os.path.abspath(prefix_root)}\0{run_id}".encode()) + 1


def run_dir(prefix_root: str, run_id: str) -> str:
    """Directory of a run on the parallel file system."""
    return os.path.join(prefix_root, run_id)


def drained(run: str, iteration: int) -> str:
    """Drained HDF5 file of a checkpoint."""
    return os.path.join(run, f"ckpt-{iteration:010d}.h5")


def drained_manifest(run: str, iteration: int) -> str:
    """Manifest of a drained checkpoint; its presence means durable."""
    return os.path.join(run, f"ckpt-{iteration:010d}.json")


def parse_drained(name: str) -> int | None:
    """Iteration of a drained manifest's file name."""
    match = _ITERATION.match(name)
    return int(match[1]) if match else None


def drained_bad(run: str, iteration: int) -> str:
    """Where the manifest of a drained checkpoint goes that did not verify."""
    return os.path.join(run, f"ckpt-{iteration:010d}.bad")


def drained_kept(run: str, iteration: int) -> str:
    """Mark of a person who wants a drained checkpoint kept."""
    return os.path.join(run, f"ckpt-{iteration:010d}.keep")


def drained_part(run: str, iteration: int) -> str:
    """File of a drain that has not come to its end."""
    return os.path.join(run, f".ckpt-{iteration:010d}.h5.part")


def drained_journal(run: str, iteration: int) -> str:
    """What of such a drain is on storage."""
    return os.path.join(run, f".ckpt-{iteration:010d}.h5.journal")


def drain_orders(run: str) -> str:
    """What is ordered of the drain that runs."""
    return os.path.join(run, "drain-orders.json")


def drain_status(run: str) -> str:
    """How far the drain is that runs, or how the last one ended."""
    return os.path.join(run, "drain-status.json")


def dropped(run: str, iteration: int) -> str:
    """Why a checkpoint of a job that is gone did not become durable."""
    return os.path.join(run, f"ckpt-{iteration:010d}.dropped")


def parse_of_drained(name: str) -> tuple[int, str] | None:
    """Iteration and the rest (``h5``, ``bad``, ``h5.part``...) of the name of a file about a drained checkpoint."""
    match = _OF_DRAINED.match(name)
    return (int(match[1]), match[2]) if match else None


def decision(run: str, epoch: int) -> str:
    """Record of what the leader decided about a proposal."""
    return os.path.join(run, "decisions", f"{epoch:016d}.json")


def costs(run: str) -> str:
    """Measured times of saves and drains."""
    return os.path.join(run, "costs.json")


def leader_key(run: str) -> str:
    """Key between leader and agents where there is no MUNGE."""
    return os.path.join(run, "leader.key")


def leader(run: str) -> str:
    """Address of the run's leader."""
    return os.path.join(run, "leader.json")


def layout(run: str) -> str:
    """Which node holds which node_rank."""
    return os.path.join(run, "layout.json")


def sets(run: str) -> str:
    """Which nodes protect each other."""
    return os.path.join(run, "sets.json")


def attempt(run: str, number: int) -> str:
    """Record of an attempt."""
    return os.path.join(run, "attempts", f"{number}.json")


def late(run: str, job_id: int, attempt: int) -> str:
    """What the nodes of a job that is gone tell each other."""
    return os.path.join(run, "late", f"{job_id}-{attempt}")


def late_lock(job: str) -> str:
    """Lock of the late drain on this node."""
    return os.path.join(job, "late.lock")


def late_log(job: str) -> str:
    """What the late drain on this node said."""
    return os.path.join(job, "late.log")
