"""The relay between MPICH and Slurm's PMI, with the requests of the real MPICH."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from slurm_resil.comm import pmi

SLURM_READS = 1023  # bytes of a request that Slurm's plugin takes for the whole; MAX_READLINE in its source
KVS = "4294967294.4294967290"  # the longest name of a step, and so of the space that its keys are in

RANK = """
from slurm_resil.comm import mpi
world = mpi.world()
print(world.size, world.rank, world.allgather(b"%d" % world.rank))
"""


def longest(request: bytes) -> int:
    """How long a request would be, bytes, if none of the bytes that it puts were zero: MPICH writes ``[7]`` for seven.

    Beside an address it puts what the memory held before, which is zeros one time and not another.
    """
    names, value = request.split(b" value=")
    return len(names) + len(b" value=") + len(re.sub(rb"\[(\d+)\]", lambda zeros: b"00" * int(zeros[1]), value))


class Step:
    """PMI of a step of two ranks on two nodes, as Slurm is one; but it reads requests of any length.

    Attributes:
        requests: What it was asked.
    """

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self._values = {"PMI_process_mapping": "(vector,(0,2,1))"}
        self._barrier = threading.Barrier(2)

    def serve(self, client: socket.socket) -> None:
        """Answer one rank until nobody has the other end any more."""
        while request := client.recv(1 << 16):
            self.requests.append(request)
            client.sendall(self._answer(dict(word.partition("=")[::2] for word in request.decode().split())))

    def _answer(self, words: dict[str, str]) -> bytes:
        match words["cmd"]:
            case "init":
                return b"cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n"
            case "get_maxes":
                return b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n"
            case "get_appnum":
                return b"cmd=appnum rc=0 appnum=-1\n"
            case "get_my_kvsname":
                return f"cmd=my_kvsname rc=0 kvsname={KVS}\n".encode()
            case "put":
                self._values[words["key"]] = words["value"]
                return b"cmd=put_result rc=0\n"
            case "get":
                found = self._values.get(words["key"])
                return b"cmd=get_result rc=1\n" if found is None else f"cmd=get_result rc=0 value={found}\n".encode()
            case "barrier_in":
                self._barrier.wait(20)
                return b"cmd=barrier_out rc=0\n"
            case "finalize":
                return b"cmd=finalize_ack rc=0\n"
        raise AssertionError(words)


def test_requests_of_mpich_fit_into_what_slurm_reads() -> None:
    pytest.importorskip("mpi4py")
    step = Step()
    with contextlib.ExitStack() as stack:
        ranks, threads = [], []
        for number in range(2):
            server, client = socket.socketpair()
            stack.enter_context(server).settimeout(50)
            env = {**os.environ, "PMI_FD": str(client.fileno()), "PMI_RANK": str(number), "PMI_SIZE": "2"}
            env |= {"PMI_JOBID": KVS, "SLURM_STEP_ID": "1", "MPIR_CVAR_CH4_NETMOD": "ucx"}
            argv = [sys.executable, "-c", RANK]
            with client:
                ranks.append(
                    subprocess.Popen(argv, env=env, pass_fds=[client.fileno()], stdout=subprocess.PIPE, text=True)
                )
            stack.callback(ranks[-1].kill)
            threads.append(threading.Thread(target=step.serve, args=(server,)))
            threads[-1].start()
        printed = [rank.communicate(timeout=50)[0] for rank in ranks]
        for thread in threads:
            thread.join(20)  # the relay has ended with the rank
            assert not thread.is_alive()
    assert printed == ["2 0 [b'0', b'1']\n", "2 1 [b'0', b'1']\n"]
    addresses = [request for request in step.requests if request.startswith(b"cmd=put") and b"-seg-" in request]
    assert len(addresses) > 2, "MPICH has published no long address"
    assert max(map(longest, addresses)) <= SLURM_READS


def test_start_that_nobody_answers_comes_to_an_end() -> None:
    pytest.importorskip("mpi4py")
    server, client = socket.socketpair()
    with server, client:
        env = {**os.environ, "PMI_FD": str(client.fileno()), "PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_STEP_ID": "1"}
        code = "from slurm_resil.comm import mpi; mpi.START_LIMIT_S = 1.0; mpi.world()"
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, pass_fds=[client.fileno()], timeout=50, check=False
        )
        assert done.returncode == -signal.SIGALRM
        assert server.recv(100).startswith(b"cmd=init"), "it was not MPI's start that took the time"


def test_offer_is_shortened_and_all_else_is_passed_on() -> None:
    slurm, slurms_end = socket.socketpair()
    slurms_end.set_inheritable(True)
    env = {"PMI_FD": str(slurms_end.detach()), "SLURM_STEP_ID": "3"}
    pmi.shorten(env)
    with slurm, socket.socket(fileno=int(env["PMI_FD"])) as mpi:
        for end in (slurm, mpi):
            end.settimeout(20)
        for said, heard in (
            (b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n", b" vallen_max=900\n"),
            (b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=512\n", b" vallen_max=512\n"),
            (b"cmd=get_result rc=0 value=vallen_max=1024\n", b" value=vallen_max=1024\n"),
        ):
            mpi.sendall(b"cmd=ask\n")
            assert slurm.recv(100) == b"cmd=ask\n"
            slurm.sendall(said)
            assert mpi.recv(100).endswith(heard)
        mpi.shutdown(socket.SHUT_RDWR)
        assert slurm.recv(100) == b""


def test_other_launchers_are_left_alone() -> None:
    for env in ({"PMI_FD": "77"}, {"SLURM_STEP_ID": "3"}, {"SLURM_STEP_ID": "3", "PMI_FD": "x"}):
        before = dict(env)
        pmi.shorten(env)
        assert env == before
