import json
import os
import signal
import subprocess
import sys

import pytest

from slurm_resil.launch import rank

SHOW = """
import json, os, signal
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_RESIL_NODE_RANK"]
print(json.dumps({
    "env": {name: os.environ.get(name) for name in names},
    "ignored": [int(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
                if signal.getsignal(n) is signal.SIG_IGN],
    "pid": os.getpid(),
}))
"""


def environment(**changes):
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(sys.path),
        "SLURM_RESIL_LAYOUT": "n1,n5,n3",
        "SLURM_RESIL_RANKS_PER_NODE": "2",
        "SLURM_LOCALID": "1",
        "SLURM_PROCID": "5",
        "SLURMD_NODENAME": "n5",
    }
    env.update(changes)
    return {name: value for name, value in env.items() if value is not None}


def start(env, *command):
    argv = [sys.executable, "-m", "slurm_resil.launch.rank", "--", *command]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30)


def test_the_place_comes_from_the_nodes_name_not_from_slurms_task_number():
    done = start(environment(), sys.executable, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["env"] == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "SLURM_RESIL_NODE_RANK": "1",
    }


def test_the_grace_signals_stay_ignored_over_exec_and_the_rank_survives_them():
    code = "import os, signal\nfor n in (15, 10, 12): os.kill(os.getpid(), n)\nprint('alive')\n" + SHOW
    done = start(environment(), sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    alive, text = done.stdout.splitlines()
    assert alive == "alive"
    assert json.loads(text)["ignored"] == [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]


def test_it_execs_and_does_not_stay_as_a_parent():
    argv = [sys.executable, "-m", "slurm_resil.launch.rank", "--", sys.executable, "-c", SHOW]
    with subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=30)
    assert json.loads(out)["pid"] == process.pid


def test_the_layout_may_be_in_a_file(tmp_path):
    names = tmp_path / "layout.names"
    names.write_text("n1,n5,n3\n")
    assert rank.place(environment(SLURM_RESIL_LAYOUT=f"@{names}")) == (1, 1, 2)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"SLURMD_NODENAME": "n9"}, "n9"),
        ({"SLURMD_NODENAME": None}, "SLURMD_NODENAME"),
        ({"SLURM_LOCALID": "2"}, "local rank 2"),
        ({"SLURM_RESIL_RANKS_PER_NODE": "many"}, "many"),
        ({"SLURM_RESIL_LAYOUT": "@/nonexistent/layout"}, "/nonexistent/layout"),
    ],
)
def test_an_impossible_place_is_one_clear_line(changes, word):
    done = start(environment(**changes), "true")
    assert done.returncode == rank.EXIT_CONFIG
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_command_that_does_not_exist_or_may_not_run(tmp_path):
    missing = start(environment(), "no-such-program")
    assert (missing.returncode, "no-such-program: no such command" in missing.stderr) == (127, True)
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    assert start(environment(), str(script)).returncode == 126


def test_it_is_light():
    code = "import sys; import slurm_resil.launch.rank; print([m for m in sys.modules if m.startswith('slurm_resil')])"
    argv = [sys.executable, "-c", code]
    out = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=30, check=True).stdout
    assert eval(out) == ["slurm_resil", "slurm_resil.launch", "slurm_resil.launch.rank"]
    code = (
        "import sys; import slurm_resil.launch.rank; print('subprocess' in sys.modules, 'dataclasses' in sys.modules)"
    )
    argv = [sys.executable, "-c", code]
    out = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=30, check=True).stdout
    assert out.split() == ["False", "False"]
