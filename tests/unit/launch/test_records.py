import json
import threading
import time

from slurm_resil.core.model import Levels
from slurm_resil.launch import records
from slurm_resil.launch.guard import AttemptRecord


def test_events_of_several_threads_do_not_mix(tmp_path):
    log = records.EventLog(str(tmp_path), 2)
    threads = [
        threading.Thread(target=lambda n=n: [log.write("x", n=n, text="y" * 500) for _ in range(50)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len(entries) == 200
    assert {entry["attempt"] for entry in entries} == {2}


def test_an_event_log_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path):
    log = records.EventLog(str(tmp_path / "missing"), 0)
    assert str(tmp_path) in log.write("x")
    assert log.write("x") == ""


def test_history_is_in_order_of_attempts_and_without_this_one(tmp_path):
    for number, restored in ((10, 30), (2, 0), (9, None)):
        attempt = records.Attempt(str(tmp_path), number, job_id=7, restarts=1, nodes=["a"])
        attempt.update(restored=restored, held=number == 9)
    assert records.history(str(tmp_path), 11) == [
        AttemptRecord(attempt=2, restored=0),
        AttemptRecord(attempt=9, restored=None, held=True),
        AttemptRecord(attempt=10, restored=30),
    ]
    assert [entry.attempt for entry in records.history(str(tmp_path), 10)] == [2, 9]
    assert records.history(str(tmp_path / "none"), 3) == []


def test_a_torn_record_counts_as_an_attempt_that_gained_nothing(tmp_path):
    records.Attempt(str(tmp_path), 0, job_id=7, restarts=1, nodes=["a"]).update(restored=5)
    (tmp_path / "attempts" / "0.json").write_text('{"restored": 5')
    (tmp_path / "attempts" / "notes.json").write_text("{}")
    assert records.history(str(tmp_path), 1) == [AttemptRecord(attempt=0, restored=None)]


def test_a_start_right_after_a_good_end_has_nothing_to_do(tmp_path):
    run = str(tmp_path)
    assert not records.complete(run, 7, restarts=2, within_s=60)
    attempt = records.Attempt(run, 3, job_id=7, restarts=1, nodes=["n1"])
    attempt.update()
    assert not records.complete(run, 7, restarts=2, within_s=60)
    now = time.time()
    for code, job, ago, expected in ((0, 7, 5, True), (1, 7, 5, False), (0, 8, 5, False), (0, 7, 90, False)):
        attempt = records.Attempt(run, 3, job_id=job, restarts=1, nodes=["n1"])
        attempt.update(outcome={"words": "x", "code": code, "at_s": now - ago})
        assert records.complete(run, 7, restarts=2, within_s=60) is expected
        assert not records.complete(run, 7, restarts=1, within_s=60)  # the same batch script runs it once more
    records.Attempt(run, 4, job_id=7, restarts=1, nodes=["n1"]).update()  # a newer one that is at work
    assert not records.complete(run, 7, restarts=2, within_s=60)


def test_levels_are_those_of_the_newest_attempt(tmp_path):
    assert records.levels(str(tmp_path)) is None
    for number, levels in ((1, {"local": 90}), (2, {"local": 60, "protected": 40, "durable": 50})):
        records.Attempt(str(tmp_path), number, job_id=7, restarts=1, nodes=["a"]).update(levels=levels)
    assert records.levels(str(tmp_path)) == Levels(local=60, protected=50, durable=50)
    for text in ("{}", '{"levels": 5}', '{"levels": {"local": "x"}}', "["):
        (tmp_path / "attempts" / "3.json").write_text(text)
        assert records.levels(str(tmp_path)) is None
