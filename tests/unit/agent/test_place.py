from __future__ import annotations

import os
import re

import pytest

from slurm_resil.agent.place import from_env
from slurm_resil.core.errors import ConfigError

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
JOB = {"SLURM_JOB_ID": "42", "SLURMD_NODENAME": "n1", "SLURM_SUBMIT_DIR": "/home/a"}


def test_nothing_at_all_is_one_process() -> None:
    place = from_env({})
    assert (place.rank, place.info.world_size, place.info.nodes, place.leader) == (0, 1, 1, None)
    # the number alone comes again in containers
    assert re.fullmatch(rf"local-{os.getpid()}-[0-9a-f]+-[0-9a-f]{{8}}", place.info.run_id)
    assert from_env({}).job_dir == place.job_dir


def test_a_named_run_outside_slurm_keeps_its_directories() -> None:
    first, second = (from_env({"SLURM_RESIL_RUN_ID": "llama"}) for _ in range(2))
    assert first == second
    assert first.job_dir != from_env({"SLURM_RESIL_RUN_ID": "other"}).job_dir


def test_torchrun() -> None:
    place = from_env(TORCHRUN | JOB | {"TORCHELASTIC_RESTART_COUNT": "2", "SLURM_RESTART_COUNT": "1"})
    assert (place.rank, place.local_rank, place.node_rank, place.ranks_per_node) == (5, 1, 1, 4)
    assert (place.info.nodes, place.info.attempt, place.info.cycle, place.info.run_id) == (2, 1, 2, "42")
    assert place.job_dir.endswith("/job-42")
    assert place.run_dir == "/home/a/.slurm-resil/42"


def test_plain_srun() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NODEID": "1"}
    place = from_env(JOB | step | {"SLURM_TASKS_PER_NODE": "2(x2)"})
    assert (place.rank, place.local_rank, place.node_rank, place.ranks_per_node, place.info.nodes) == (3, 1, 1, 2, 2)
    with pytest.raises(ConfigError, match="equally many"):
        from_env(JOB | step | {"SLURM_TASKS_PER_NODE": "3,1"})


def test_a_batch_script_is_no_rank_of_the_jobs_tasks() -> None:
    assert from_env(JOB | {"SLURM_NTASKS": "64", "SLURM_PROCID": "0"}).info.world_size == 1


def test_all_faults_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        from_env({"RANK": "x", "SLURM_RESIL_EVERY": "0", "SLURM_RESIL_RUN_ID": "../up"})
    assert len(caught.value.faults) == 3
    assert "SLURM_RESIL_EVERY='0'" in str(caught.value)


@pytest.mark.parametrize("change", [{"RANK": "9"}, {"RANK": "4"}, {"LOCAL_WORLD_SIZE": "3"}])
def test_ranks_that_do_not_fit(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="equally many"):
        from_env(TORCHRUN | change)
