import signal

import pytest

from slurm_resil.launch.verdict import judge


@pytest.mark.parametrize(
    ("line", "code", "task", "node", "number"),
    [
        ("srun: error: n3: task 2: Exited with exit code 7", 7, 2, "n3", None),
        ("srun: error: n3: tasks 4-5: Exited with exit code 1", 1, 4, "n3", None),
        ("srun: error: n3: tasks 4,6: Killed", 137, 4, "n3", signal.SIGKILL),
        ("srun: error: n1: task 0: Segmentation fault (core dumped)", 139, 0, "n1", signal.SIGSEGV),
        ("srun: error: n1: task 0: Segmentation fault", 139, 0, "n1", signal.SIGSEGV),
        ("srun: error: n1: task 0: Out Of Memory", 137, 0, "n1", signal.SIGKILL),
        ("srun: error: n1: task 0: Terminated", 143, 0, "n1", signal.SIGTERM),
    ],
)
def test_lines_of_srun(line, code, task, node, number):
    verdict = judge([line], 1)
    assert (verdict.code, verdict.task, verdict.node, verdict.signal) == (code, task, node, number)
    assert node in verdict.words


@pytest.mark.parametrize(
    ("code", "final"),
    [(2, True), (65, True), (77, True), (78, True), (126, True), (127, True), (1, False), (75, False)],
)
def test_what_no_new_start_mends(code, final):
    """Of a rank: srun's own codes mean other things."""
    assert bool(judge([f"srun: error: n3: task 2: Exited with exit code {code}"], code).final) is final
    assert judge(["srun: error: odd"], code).final == ""


def test_the_first_one_is_the_culprit_not_those_that_srun_killed():
    lines = [
        "srun: error: n3: task 2: Exited with exit code 7",
        "srun: Terminating StepId=5.1",
        "srun: error: n1: task 0: Killed",
        "srun: error: n2: task 1: Killed",
    ]
    assert judge(lines, 137).task == 2
    assert judge(lines, 137).code == 7


def test_ranks_that_lost_a_peer_are_not_the_culprit_whoever_is_reported_first():
    lines = [
        "srun: error: n1: tasks 0-1: Exited with exit code 1",
        "srun: error: n2: task 2: Exited with exit code 1",
        "srun: error: n2: task 3: Exited with exit code 7",
        "srun: error: n3: tasks 4-5: Exited with exit code 1",
    ]
    assert (judge(lines, 1).task, judge(lines, 1).code) == (3, 7)
    assert judge(lines[:2], 1).task == 0


def test_a_tasks_own_line_is_not_taken_for_sruns():
    # srun -l labels what tasks write
    verdict = judge(["0: srun: error: n9: task 5: Exited with exit code 99"], 3)
    assert verdict.task is None
    assert verdict.code == 3


def test_all_well():
    assert judge(["srun: error: n1: task 0: Killed"], 0).ok


def test_node_failure_and_launch_failure():
    assert judge(["srun: error: Node failure on n4"], 1).node == "n4"
    failed = judge(["srun: error: Unable to create step for job 5: Requested nodes are busy"], 1)
    assert failed.launch_failed
    assert "busy" in failed.words


def test_srun_itself_killed():
    verdict = judge([], -9)
    assert verdict.code == 137
    assert "SIGKILL" in verdict.words
