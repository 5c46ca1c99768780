from dataclasses import replace

import pytest

from slurm_resil.core.errors import ConfigError, ResilError, ServiceError, UsageError
from slurm_resil.launch import records, setup
from slurm_resil.launch.cluster import Customs, LocalCluster
from slurm_resil.launch.setup import Wishes
from slurm_resil.slurm.job import JobRecord

JOB = JobRecord(
    id=12, uid=1, state="RUNNING", restarts=2, requeue=True, batch=True, held=False, nodes=(), reason="None"
)
ENV = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "rack1-n[08-10],rack2-n1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_RESTART_COUNT": "2",
    "SLURMD_NODENAME": "rack1-n08",
}


class Cluster(LocalCluster):
    """Slurm with a given record."""

    def __init__(self, record: JobRecord | None, customs: Customs | None = None) -> None:
        self._record, self._customs = record, customs or Customs()

    def record(self) -> JobRecord:
        if self._record is None:
            raise ServiceError("slurmctld does not answer")
        return self._record

    def customs(self, partition: str) -> Customs:
        return self._customs


def test_what_slurm_says_about_the_allocation():
    found = setup.slurm_allocation(ENV, Wishes())
    assert found.nodes == ("rack1-n08", "rack1-n09", "rack1-n10", "rack2-n1")
    assert (found.job_id, found.attempt, found.ranks_per_node, found.run_id) == (12, 2, 4, "12")
    assert setup.slurm_allocation(ENV, Wishes(run_id="llama")).run_id == "llama"


def test_attempts_of_a_run_are_counted_beyond_what_slurm_counts(tmp_path):
    env = ENV | {"SLURM_RESIL_PREFIX": str(tmp_path), "SLURM_RESIL_RUN_ID": "llama"}
    run = setup.run_dir_of(env, "llama")
    for number in (0, 2):  # the launcher of attempt 1 did not come to write anything
        records.Attempt(run, number, job_id=12, restarts=number, nodes=["n1"]).update()
    found = setup.slurm_allocation(env, Wishes())  # slurmctld was killed and has forgotten the last start
    assert (found.attempt, found.restarts) == (3, 2)
    found = setup.slurm_allocation(env | {"SLURM_JOB_ID": "13", "SLURM_RESTART_COUNT": ""}, Wishes())  # a successor
    assert (found.attempt, found.restarts) == (3, 0)
    found = setup.slurm_allocation(env | {"SLURM_RESTART_COUNT": "7"}, Wishes())
    assert (found.attempt, found.restarts) == (7, 7)


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"SLURM_JOB_ID": ""}, UsageError, "--local"),
        ({"SLURM_JOB_NODELIST": "n[1-"}, ConfigError, "SLURM_JOB_NODELIST"),
        ({"SLURM_NTASKS_PER_NODE": "two"}, ConfigError, "SLURM_NTASKS_PER_NODE"),
    ],
)
def test_an_environment_that_makes_no_sense_is_named(changes, error, word):
    with pytest.raises(error, match=word):
        setup.slurm_allocation(ENV | changes, Wishes())


@pytest.mark.parametrize("name", ["a/b", "..", ""])
def test_a_runs_name_is_no_path(name):
    with pytest.raises(ConfigError):
        setup.run_dir_of({}, name)


def test_a_run_directory_that_cannot_be_made_is_named_with_a_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="SLURM_RESIL_PREFIX") as caught:
        setup.make_run_dir(str(tmp_path / "file" / "run"))
    assert str(tmp_path / "file" / "run") in str(caught.value)


def test_interval():
    assert setup.interval_s({}, Wishes()) is None
    assert setup.interval_s({"SLURM_RESIL_INTERVAL": "10min"}, Wishes()) == 600
    assert setup.interval_s({"SLURM_RESIL_INTERVAL": "10min"}, Wishes(interval="5s")) == 5
    for bad in ("10", "0s", "soon"):
        with pytest.raises(ResilError):
            setup.interval_s({"SLURM_RESIL_INTERVAL": bad}, Wishes())


def test_d6_what_slurm_would_not_requeue_is_known_at_the_start():
    for record, word in (
        (replace(JOB, requeue=False), "--requeue"),
        (replace(JOB, batch=False), "sbatch"),
    ):
        rules, warning = setup.rules(Cluster(record), Wishes())
        assert not rules.can_continue
        assert word in warning
    rules, warning = setup.rules(Cluster(JOB, Customs(preempt_mode="CANCEL")), Wishes())
    assert rules.can_continue
    assert "PreemptMode=CANCEL" in warning
    rules, warning = setup.rules(Cluster(JOB, Customs(kill_wait_s=8)), Wishes())
    assert (rules.can_continue, rules.kill_wait_s, warning) == (True, 8, "")


def test_n4_no_answer_is_not_taken_for_a_no():
    rules, warning = setup.rules(Cluster(None), Wishes())
    assert rules.can_continue
    assert "cannot tell" in warning


def test_a_local_run_has_none_of_slurms_variables():
    env = setup.clean_env(ENV | {"SLURM_RESIL_EVERY": "5", "PATH": "/bin"}, Wishes(local=True))
    assert env == {"SLURM_RESIL_EVERY": "5", "PATH": "/bin"}
    assert setup.clean_env(ENV, Wishes()) == ENV
