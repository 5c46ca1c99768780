"""Slurm's answers, recorded on 22.05.8, and a user who gives his job a name that looks like one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from slurm_resil.core.errors import ConfigError, NotPermittedError, ServiceError
from slurm_resil.core.model import EndTime, JobTimes
from slurm_resil.slurm.job import COLUMNS, JobRecord, duration_s, nodes_of, read_job
from slurm_resil.slurm.scontrol import Commands, fields

FORGED = "x UserId=root(0) GroupId=root(0) JobState=RUNNING Restarts=99 NodeList=node[1-5] Requeue=1"
REST = (
    " UserId=alice(20001) GroupId=alice(20001) MCS_label=N/A Priority=4294901759 Nice=0 Account=(null) QOS=(null)"
    " JobState=PENDING Reason=Resources Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0"
    " RunTime=00:00:08 TimeLimit=01:00:00 TimeMin=N/A StartTime=1796130172 EndTime=1796133772 Deadline=N/A"
    " Partition=train AllocNode:Sid=ctl:339 ReqNodeList=(null) ExcNodeList=(null) NodeList=node[2-3] BatchHost=node2"
    " NumNodes=2 ReqB:S:C:T=0:0:*:* Command=(null) WorkDir=/home/alice StdErr=/dev/null Power= "
)
NODE = (
    "NodeName=node1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=5.37 AvailableFeatures=(null)"
    " ActiveFeatures=(null) Gres=(null) NodeAddr=10.87.0.11 NodeHostName=node1 Version=22.05.8"
    " OS=Linux 6.1.0-18-amd64 #1 SMP PREEMPT_DYNAMIC Debian 6.1.76-1 (2024-02-01)  RealMemory=1024 Sockets=4"
    " State=IDLE+DRAIN ThreadsPerCore=1 Owner=N/A Partitions=train,urgent  BootTime=1796130082 CfgTRES=cpu=4,mem=1G"
    " AllocTRES= CapWatts=n/a ExtSensorsTemp=n/s"
)
PLAIN = {
    "JobID": "1",
    "ArrayJobID": "1",
    "ArrayTaskID": "N/A",
    "UserID": "20001",
    "State": "RUNNING",
    "RestartCnt": "0",
    "Requeue": "1",
    "BatchFlag": "1",
    "PriorityLong": "4294901759",
    "TimeUsed": "1:07",
    "TimeLimit": "30:00",
    "StartTime": "1796130100",
    "EndTime": "1796131900",
    "PreemptTime": "N/A",
    "Partition": "train",
    "NodeList": "node[2-3]",
    "Reason": "None",
}


def row(**other: str) -> str:
    assert set(PLAIN) == {name for name, _ in COLUMNS}
    return "".join(f"{(PLAIN | other)[name]}|" for name, _ in COLUMNS)


ROW = row()


# -- scontrol


def test_a_job_line() -> None:
    found = fields("JobId=7 JobName=wrap" + REST)
    assert found["UserId"] == "alice(20001)"
    assert (found["JobState"], found["NodeList"], found["RunTime"]) == ("PENDING", "node[2-3]", "00:00:08")
    assert (found["AllocNode:Sid"], found["ReqB:S:C:T"], found["Power"]) == ("ctl:339", "0:0:*:*", "")
    assert fields("") == fields("no jobs in the system") == {}


@pytest.mark.parametrize("name", ["my long name", "ünï|cödé;1001|0;", "a\nb", "trailing ", "=", "a =b", "(1001)"])
def test_names_with_odd_characters_change_nothing_else(name: str) -> None:
    plain, odd = fields("JobId=7 JobName=wrap" + REST), fields(f"JobId=7 JobName={name}{REST}")
    del plain["JobName"]
    odd.pop("JobName", None)
    assert odd == plain


def test_a_forged_name_does_deceive_who_reads_scontrol() -> None:
    """Why nobody may decide on somebody else's job by this; if it ever fails, the docstring can be mended."""
    assert fields(f"JobId=7 JobName={FORGED}{REST}")["UserId"] == "root(0)"


def test_a_node_line() -> None:
    found = fields(NODE + " Reason=bad dimm [root@1796130167]")
    assert found["OS"] == "Linux 6.1.0-18-amd64 #1 SMP PREEMPT_DYNAMIC Debian 6.1.76-1 (2024-02-01)"
    assert (found["State"], found["NodeAddr"]) == ("IDLE+DRAIN", "10.87.0.11")
    assert found["Reason"] == "bad dimm [root@1796130167]"
    assert "Reason" not in fields(NODE)


@pytest.mark.parametrize("text", ["Reason", "Comment", "Extra"])
def test_text_about_a_node_is_text(text: str) -> None:
    forged = "x State=IDLE NodeAddr=1.2.3.4\n Port=1 Reason=resil: Comment=resil: Reason=resil:"
    found = fields(f"{NODE} {text}={forged}")
    assert found == {**fields(NODE), text: forged}
    assert "Port" not in found


def test_a_comment_cannot_pass_for_the_engines_reason() -> None:
    assert "Reason" not in fields(NODE + " Comment=mine Reason=resil: job 7")
    assert fields(NODE + " Reason=mine Comment=resil: Reason=resil:")["Reason"].startswith("mine")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00:00:08", 8),
        ("1:00:00", 3600),
        ("2-03:04:05", 183845),
        ("UNLIMITED", None),
        ("", None),
        ("5:00", 300),
        ("7", None),
    ],
)
def test_durations(text: str, expected: float | None) -> None:
    assert duration_s(text) == expected


# -- squeue, for what is to be trusted


def test_a_job() -> None:
    assert read_job(ROW + "\n", 1) == JobRecord(
        id=1,
        uid=20001,
        state="RUNNING",
        restarts=0,
        requeue=True,
        batch=True,
        held=False,
        nodes=("node2", "node3"),
        reason="None",
        partition="train",
        times=JobTimes(start_s=1796130100.0, end=EndTime.known(datetime.fromtimestamp(1796131900, UTC))),
    )


def test_times_of_a_job() -> None:
    unlimited = read_job(row(TimeLimit="UNLIMITED", EndTime="N/A"), 1)
    assert (unlimited.times.end, unlimited.timed_out) == (EndTime.unlimited(), False)
    assert read_job(row(EndTime="N/A"), 1).times.end == EndTime.unknown()
    assert read_job(row(PreemptTime="1796130200"), 1).preempted
    assert read_job(row(TimeUsed="1-00:00:01", TimeLimit="1-00:00:00"), 1).timed_out
    assert read_job(row(State="PENDING", StartTime="N/A", TimeUsed="0:00"), 1).times.start_s == 0


@pytest.mark.parametrize(
    ("other", "cancelled"),
    [
        ({}, False),
        ({"State": "COMPLETING"}, True),
        ({"State": "COMPLETING", "PreemptTime": "1796130200"}, False),
        ({"State": "COMPLETING", "TimeUsed": "30:02"}, False),
        ({"State": "CANCELLED"}, True),
        ({"State": "PENDING"}, False),
    ],
)
def test_completing_hides_why_and_only_the_rest_of_the_record_tells(other: dict[str, str], cancelled: bool) -> None:
    assert read_job(row(**other), 1).cancelled is cancelled


def test_no_column_is_one_that_a_user_writes() -> None:
    written_by_users = {"name", "comment", "account", "wckey", "qos", "command", "workdir", "admin_comment", "username"}
    assert not {name.lower() for name, _ in COLUMNS} & written_by_users


def test_tasks_of_an_array_are_told_apart() -> None:
    rows = [row(JobID="5"), row(JobID="6", RestartCnt="3"), row(JobID="4", State="PENDING", PriorityLong="0")]
    assert [read_job("\n".join(rows), number).restarts for number in (4, 5, 6)] == [0, 0, 3]
    assert read_job("\n".join(rows), 4).held


def test_a_task_with_the_arrays_own_id_is_not_called_by_it() -> None:
    rows = [row(JobID="9", ArrayJobID="8", ArrayTaskID="0"), row(JobID="8", ArrayJobID="8", ArrayTaskID="1")]
    assert [read_job("\n".join(rows), number).label for number in (9, 8)] == ["8_0", "8_1"]
    assert read_job(row(ArrayTaskID="3-7%2", State="PENDING"), 1).label == read_job(ROW, 1).label == "1"


def test_a_reason_may_be_any_text() -> None:
    reason = "(Nodes required for job are DOWN, DRAINED | reserved; UserID=0|1|2)"
    assert read_job(row(Reason=reason), 1).reason == reason
    assert read_job(row(BatchFlag="2", NodeList="", Reason="x|RUNNING"), 1).nodes == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        row(JobID="2"),
        f"{ROW}\n{ROW}",
        f"{ROW}\nanything else",
        ROW.replace("1:07|30:00|", ""),  # columns are missing, as when squeue does not know one
        ROW.replace("20001", "alice"),
        ROW.replace("20001", "-1"),
        ROW.replace("20001", ""),
        ROW.replace("RUNNING", "running x"),
        ROW.replace("node[2-3]", "node[2-"),  # cut off
        " " + ROW,
        "slurm_load_jobs error: Unable to contact slurm controller",
    ],
)
def test_an_answer_that_is_not_understood_is_no_answer(text: str) -> None:
    with pytest.raises(ServiceError):
        read_job(text, 1)


def test_host_lists() -> None:
    assert nodes_of("node[2-3,05]") == ("node2", "node3", "node05")
    assert nodes_of("") == nodes_of("(null)") == ()


# -- the runner


def commands(tmp_path: Path, script: str, env: Mapping[str, str] | None = None) -> Commands:
    for name in ("scontrol", "squeue"):
        program = tmp_path / name
        program.write_text(f"#!{sys.executable} -IS\nimport json, os, sys\n{script}\n")
        program.chmod(0o755)
    return Commands({"PATH": str(tmp_path), **(env or {})})


def test_what_is_asked_and_in_which_environment(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"json.dump([sys.argv[1:], dict(os.environ)], open({str(log)!r}, 'w')); print({ROW!r})"
    slurm = commands(tmp_path, script, {"SQUEUE_USERS": "bob", "LC_ALL": "de_DE.UTF-8", "KEPT": "1"})
    assert slurm.job(1).uid == 20001
    assert slurm.count == 1
    argv, env = json.loads(log.read_text())
    assert argv[argv.index("--jobs") + 1] == "1"
    assert "--states=all" in argv
    assert (env["LC_ALL"], env["SLURM_TIME_FORMAT"], env["KEPT"]) == ("C", "%s", "1")
    assert "SQUEUE_USERS" not in env


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("slurm_load_jobs error: Invalid job id specified", NotPermittedError),
        ("slurm_update error: Access/permission denied", NotPermittedError),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", ServiceError),
        ("", ServiceError),
    ],
)
def test_refusals_are_told_from_failures(tmp_path: Path, words: str, error: type[Exception]) -> None:
    slurm = commands(tmp_path, f"print({ROW!r}); print({words!r}, file=sys.stderr); sys.exit(1)")
    for call in (lambda: slurm.job(1), lambda: slurm.show("node", "node1"), lambda: slurm.excluded(1)):
        with pytest.raises(error):
            call()


def test_no_answer_is_a_failure(tmp_path: Path) -> None:
    slurm = commands(tmp_path, "")
    for call in (lambda: slurm.job(1), lambda: slurm.show("node", "node1"), lambda: slurm.excluded(1)):
        with pytest.raises(ServiceError):
            call()


def test_configuration_with_empty_values(tmp_path: Path) -> None:
    said = (
        "Configuration data as of 2026\nEpilog                  = \nJobRequeue              = 1\nKillWait  = 30 sec\n"
    )
    assert commands(tmp_path, f"print({said!r})").config() == {"Epilog": "", "JobRequeue": "1", "KillWait": "30 sec"}


def test_a_column_that_squeue_does_not_know_is_no_empty_one(tmp_path: Path) -> None:
    script = "print('1||'); print('squeue: error: Invalid job format specification: Requeue', file=sys.stderr)"
    with pytest.raises(ServiceError, match="Invalid job format"):
        commands(tmp_path, script).job(1)


def test_a_command_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_resil.slurm.scontrol.TIMEOUT_S", 0.5)
    pid = tmp_path / "pid"
    slurm = commands(tmp_path, f"import time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    with pytest.raises(ServiceError, match="did not answer"):
        slurm.job(1)
    if pid.exists():  # it may not even have come that far
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_a_missing_command_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="squeue is not found"):
        Commands({"PATH": str(tmp_path)}).job(1)


def test_excluded_nodes(tmp_path: Path) -> None:
    assert commands(tmp_path, "print('1|node[2,4]')").excluded(1) == ("node2", "node4")
    assert commands(tmp_path, "print('1|')").excluded(1) == ()
