"""Rows of the cases from the field about saves that end in the agent: real scripts with real agents, no Slurm."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nodes import wait_for

from slurm_resil.catalog import LocalCatalog

pytestmark = pytest.mark.torch
PACKAGE = Path(__file__).resolve().parents[2] / "slurm_resil"
SAVER = """
import json, os, sys, time
import torch
import slurm_resil as sr

options = json.loads(sys.argv[1])

def say(**fields):
    print(json.dumps(fields), flush=True)

tensor = torch.zeros(options.get("elements", 1000))
with sr.Checkpointer.from_env({"tensor": tensor}, **options.get("arguments", {})) as ck:
    ck.restore()
    for number in range(1, options["saves"] + 1):
        tensor.fill_(number)
        began = time.monotonic()
        try:
            given = ck.step(number) if options.get("cadence") else ck.save(number)
        except sr.ResilError as error:
            say(raised=str(error))
            break
        say(number=number, given=given, seconds=time.monotonic() - began, error=ck.last_error)
    if options.get("die"):
        os.kill(os.getpid(), 9)
    if options.get("wait"):
        began = time.monotonic()
        sealed = ck.wait(timeout_s=30)
        ck.step(options["saves"] + 1)
        ck.close(wait_s=1)
        say(sealed=sealed, seconds=time.monotonic() - began, error=ck.last_error)
"""


def start(work: Path, options: dict[str, Any], *, fault: str = "") -> subprocess.Popen[str]:
    script = work / "saver.py"
    script.write_text(SAVER)
    (work / "bb").mkdir()
    env = {"SLURM_RESIL_BB_ROOT": str(work / "bb"), "SLURM_RESIL_RUN_ID": "cases", "SLURM_RESIL_FAULT": fault}
    return subprocess.Popen(
        [sys.executable, str(script), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=work,
        env=os.environ | env,
    )


def end(process: subprocess.Popen[str]) -> tuple[list[dict[str, Any]], str]:
    out, errors = process.communicate(timeout=120)
    return [json.loads(line) for line in out.splitlines()], errors


def sealed(work: Path) -> list[int]:
    jobs = list((work / "bb").glob("job-*"))
    return sorted(LocalCatalog(str(jobs[0]), run_id="cases").sealed()) if jobs else []


def test_s1_a_failure_in_the_agent_reaches_the_rank(tmp_path: Path) -> None:
    lines, errors = end(start(tmp_path, {"saves": 1, "wait": True}, fault="agent.seal:raise"))
    assert lines[0]["given"]
    last = lines[-1]
    assert not last["sealed"]
    assert last["seconds"] < 25
    assert "iteration 1 failed" in last["error"]
    assert "injected at agent.seal" in last["error"]
    assert "rank 0" in errors


def test_s8_n10_the_last_save_is_completed_though_its_process_is_dead(tmp_path: Path) -> None:
    process = start(tmp_path, {"saves": 1, "die": True, "elements": 20_000_000})
    end(process)
    assert process.returncode == -signal.SIGKILL
    wait_for("the shard of the dead process to be sealed", lambda: sealed(tmp_path) == [1], 30)


@pytest.mark.parametrize("policy", ["skip", "fail"])
@pytest.mark.parametrize("fault", ["hang", "stop"])  # sealing is slow; the whole agent stands still
def test_s11_saves_do_not_queue_up_when_sealing_is_slow(tmp_path: Path, policy: str, fault: str) -> None:
    """Slots are all that there ever is, and training waits for none."""
    arguments = {"every": 1, "backpressure": policy}
    options = {"saves": 12, "cadence": True, "arguments": arguments, "die": True}
    try:
        lines, _ = end(start(tmp_path, options, fault=f"agent.seal:{fault}@*"))
    finally:
        agents = [process for process in Path("/proc").iterdir() if _belongs(process, tmp_path)]
        for process in agents:
            os.kill(int(process.name), signal.SIGKILL)
    assert len(agents) == 1
    assert 1 <= len(list((tmp_path / "bb").glob("job-*/slots/*.h5"))) <= 4
    if policy == "fail":
        assert "raised" in lines[-1]
        return
    assert len(lines) == 12
    assert "iteration 12 failed" in lines[-1]["error"]
    slow = [line for line in lines if line["seconds"] > 1]
    assert len(slow) <= (0 if fault == "hang" else 1)


def _belongs(process: Path, work: Path) -> bool:
    try:
        return f"SLURM_RESIL_BB_ROOT={work}/bb".encode() in (process / "environ").read_bytes()
    except OSError:
        return False


COLLECTIVES = {"all_reduce", "all_gather", "all_gather_object", "barrier", "broadcast", "gather", "scatter", "reduce"}
COLLECTIVES |= {"broadcast_object_list", "gather_object", "monitored_barrier", "new_group", "init_process_group"}


def test_s16_nothing_talks_on_the_users_process_groups() -> None:
    """What trains is never waited for on its own groups: there is no collective of torch's to be found at all."""
    found, seen = [], 0
    for path in PACKAGE.rglob("*.py"):
        if path.is_relative_to(PACKAGE / "drain") or path.is_relative_to(PACKAGE / "comm"):
            continue  # MPI among movers, which train nothing
        tree = ast.parse(path.read_text())
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        seen += len(calls)
        found += [
            f"{path}:{call.lineno}"
            for call in calls
            if isinstance(call, ast.Attribute) and call.attr in COLLECTIVES and "dist" in ast.unparse(call.value)
        ]
    assert seen > 1000
    assert found == []
