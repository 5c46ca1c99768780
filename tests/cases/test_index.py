"""Every case from the field, by number, with the tests that hold it; a test that is renamed away is noticed here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SAVING, RESTORING, AGENT = "cases/test_saving.py", "cases/test_restoring.py", "cases/test_agent_saves.py"
RANK, POLICY, LAUNCH = "unit/launch/test_rank.py", "unit/launch/test_policy.py", "cluster/test_launch.py"
WALLTIME, PREEMPTION, LOSS = (f"cluster/test_story_{name}.py" for name in ("walltime", "preemption", "node_loss"))
ENGINE, LIMITS, COLLECTIVE = "cluster/test_engine.py", "unit/recovery/test_policy.py", "unit/drain/test_collective.py"
HELD = {
    "S1": [f"{AGENT}::test_s1_a_failure_in_the_agent_reaches_the_rank"],
    "S2": [f"{SAVING}::test_s2_s3_s12_killed_at_any_moment"],
    "S3": [f"{SAVING}::test_s2_s3_s12_killed_at_any_moment"],
    "S4": [
        f"{SAVING}::test_s4_every_tensor_is_overwritten_right_after_the_write",
        f"{PREEMPTION}::test_tensors_may_change_right_after_a_save",
    ],
    "S5": [f"{SAVING}::test_s5_tensors_that_were_reallocated_are_saved_anew"],
    "S6": [f"{SAVING}::test_s6_what_appears_later_is_saved"],
    "S7": [f"{SAVING}::test_s7_storage_that_refuses_in_the_middle"],
    "S8": [f"{AGENT}::test_s8_n10_the_last_save_is_completed_though_its_process_is_dead"],
    "S9": [f"{SAVING}::test_s9_a_burst_buffer_that_is_too_small_is_found_before"],
    "S10": [f"{SAVING}::test_s10_memory_is_flat_over_200_saves"],
    "S11": [f"{AGENT}::test_s11_saves_do_not_queue_up_when_sealing_is_slow"],
    "S12": [f"{SAVING}::test_s12_what_a_crash_left_does_not_hinder_the_same_iteration"],
    "S13": [f"{SAVING}::test_s13_a_state_that_cannot_be_saved_leaves_everything_as_it_was"],
    "S14": [f"{SAVING}::test_s14_memory_is_registered_once"],
    "S15": [f"{SAVING}::test_s15_the_old_one_goes_only_when_the_new_one_is_durable"],
    "S16": [f"{AGENT}::test_s16_nothing_talks_on_the_users_process_groups"],
    "R1": [f"{RESTORING}::test_r1_r2_a_flipped_bit_is_found_and_the_next_tier_taken"],
    "R2": [f"{RESTORING}::test_r1_r2_a_flipped_bit_is_found_and_the_next_tier_taken"],
    "R3": [f"{RESTORING}::test_r3_another_precision_is_refused"],
    "R4": [f"{RESTORING}::test_r4_tied_weights_are_stored_once_and_restored_shared"],
    "R5": [f"{RESTORING}::test_r5_an_interrupted_save_is_ignored"],
    "R6": [f"{RESTORING}::test_r6_the_loaders_place_is_never_dropped_without_a_word"],
    "R7": [f"{RESTORING}::test_r7_shards_are_found_by_what_they_are", f"{LOSS}::test_node_loss"],
    "R8": [f"{RESTORING}::test_r8_names_types_and_shapes_before_the_first_byte"],
    "D1": [f"{RANK}::test_the_grace_signals_stay_ignored_over_exec_and_the_rank_survives_them"],
    "D2": [
        "fault/test_agents.py::test_signals_of_a_grace_period_stop_the_run_and_not_the_agent",
        f"{PREEMPTION}::test_preemption",
    ],
    "D3": [f"{POLICY}::test_d3_ranks_that_never_arrive_the_last_sealed_checkpoint_is_drained_in_time"],
    "D4": ["unit/launch/test_deadline.py::test_a_minute_is_enough_and_the_notice_comes_once"],
    "D5": [f"{WALLTIME}::test_the_limit_is_followed_when_it_changes"],
    "D6": [f"{LAUNCH}::test_d6_what_cannot_be_requeued_says_so_at_once_and_ends_with_75"],
    "D7": [f"{LAUNCH}::test_a_cancelled_job_ends_within_kill_wait_and_does_not_come_back"],
    "D8": [f"{ENGINE}::test_a_registered_job_that_slurm_requeues_does_not_wait_two_minutes"],
    "D9": [f"{LAUNCH}::test_d9_attempts_that_gain_nothing_end_in_a_held_job_with_the_reason"],
    "D10": [f"{LAUNCH}::test_d10_tasks_of_an_array_with_a_name_of_any_kind"],
    "D11": [f"{PREEMPTION}::test_preemption", f"{WALLTIME}::test_walltime"],
    "D12": [f"{ENGINE}::test_d12_nobody_takes_the_good_nodes_meanwhile"],
    "N1": [f"{ENGINE}::test_a_job_goes_on_with_the_spare"],
    "N2": [f"{LIMITS}::test_the_breaker_counts_nodes_of_all_jobs_once_each"],
    "N3": [f"{ENGINE}::test_what_a_person_has_taken_out_is_left_alone"],
    "N4": [
        "unit/launch/test_setup.py::test_n4_no_answer_is_not_taken_for_a_no",
        f"{ENGINE}::test_an_outage_of_slurmctld_in_the_middle_is_waited_for",
    ],
    "N9": [
        f"{COLLECTIVE}::test_shards_are_pinned_while_they_are_read",
        "unit/drain/test_mover.py::test_killed_mover_publishes_nothing_and_the_next_one_does",
    ],
    "N10": [f"{AGENT}::test_s8_n10_the_last_save_is_completed_though_its_process_is_dead"],
    "N11": [f"{LOSS}::test_node_loss"],
    "N12": [f"{COLLECTIVE}::test_no_run_directory"],
}
# nothing here does this yet, so that nothing can get it wrong: a row moves up when the part comes
OPEN = {
    "N5": "node health check",
    "N6": "node health check",
    "N7": "resets and reboots by the engine",
    "N8": "spares inside the allocation",
}


def test_all_rows_are_here() -> None:
    rows = [
        f"{kind}{number}" for kind, last in (("S", 16), ("R", 8), ("D", 12), ("N", 12)) for number in range(1, last + 1)
    ]
    assert sorted(rows) == sorted([*HELD, *OPEN])


@pytest.mark.parametrize("row", HELD)
def test_its_tests_exist(row: str) -> None:
    for test in HELD[row]:
        path, _, name = test.partition("::")
        tree = ast.parse((TESTS / path).read_text())
        assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], test
