"""Why a run failed, and what it wrote: known afterwards, within bounds, whoever was killed in between."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from strata.core.faults.failures import WorkerError
from strata.core.faults.restarts import Policy
from strata.launch.causes import Failures
from strata.launch.output import OutputFile, OutputReader, Position


class Story:
    """A run as the supervisor hears of it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.kills = 0
        self.failures = Failures(clock=lambda: self.now_s, oom_kills=lambda: self.kills)

    def round(self, *, rank: int, code: int, elapsed_s: float = 5.0) -> str:
        self.now_s += elapsed_s
        cause = self.failures.read_line(
            None, f"E1115 failed (exitcode: {code}) local_rank: {rank} (pid: 4711) of fn: x"
        )
        assert cause is not None
        return cause.message

    def raised(self, rank: int, text: str, *, step: int | None = None) -> None:
        kind, _, message = text.partition(": ")
        trace = f"Traceback (most recent call last):\n  File x\n{text}\n"
        error = WorkerError(type=kind, message=message, where=("x:1",), step=step, traceback=trace)
        self.failures.reported(rank, {**error.to_dict(), "exit_code": 1})

    def exited(self, rank: int, code: int) -> None:
        error = WorkerError(type="SystemExit", message=f"ended with status {code}")
        self.failures.reported(rank, {**error.to_dict(), "exit_code": code})


def test_an_exception_is_reported_with_its_traceback_and_by_its_first_rank() -> None:
    story = Story()
    story.raised(1, "ValueError: no such shape 7")
    story.raised(0, "RuntimeError: connection closed by peer")
    assert story.round(rank=1, code=1) == "rank 1: ValueError: no such shape 7"
    cause = story.failures.cause(1, asked_to_stop=False)
    assert cause is not None
    assert (cause.kind, cause.rank, cause.exit_code, cause.may_retry) == ("exception", 1, 1, True)
    assert cause.traceback.endswith("ValueError: no such shape 7\n")


def test_a_signal_has_its_name_and_memory_that_ran_out_is_called_so() -> None:
    story = Story()
    assert story.round(rank=0, code=-signal.SIGSEGV) == "rank 0 was killed by SIGSEGV"
    assert story.round(rank=1, code=-signal.SIGKILL) == "rank 1 was killed by SIGKILL"
    story.kills += 1
    assert "memory ran out" in story.round(rank=1, code=-signal.SIGKILL)
    assert story.round(rank=1, code=-signal.SIGKILL) == "rank 1 was killed by SIGKILL"
    story.kills += 1  # Somebody else's, long before this one was killed.
    for _ in range(10):
        story.failures.tick()
    assert story.round(rank=1, code=-signal.SIGKILL) == "rank 1 was killed by SIGKILL"
    story.kills += 1
    story.round(rank=1, code=-signal.SIGKILL)
    cause = story.failures.cause(1, asked_to_stop=False)
    assert cause is not None
    assert (cause.kind, cause.signal) == ("oom", "SIGKILL")
    agent = Story().failures.cause(-signal.SIGKILL, asked_to_stop=False)
    assert agent is not None
    assert agent.message == "the torchrun agent was killed by SIGKILL"


def test_a_status_is_reported_with_the_last_lines() -> None:
    story = Story()
    story.failures.read_line(0, "usage: no --such flag")
    story.exited(0, 3)
    assert story.round(rank=0, code=3) == "rank 0 ended with status 3: usage: no --such flag"


def test_an_error_that_comes_back_without_a_new_step_is_given_up() -> None:
    story = Story()
    for step in (3, 9, 9):
        assert story.failures.hopeless() is None
        story.raised(1, "RuntimeError: connection closed by peer")
        story.raised(0, f"ValueError: bad value at 0x{step}", step=step)
        story.round(rank=1, code=1)
    cause = story.failures.hopeless()
    assert cause is not None
    assert not cause.may_retry
    assert cause.rank == 0
    assert cause.message == (
        "rank 0: ValueError: bad value at 0x9 (not started again: the same error came back and no step was completed "
        "after step 9 in between)"
    )


def test_the_same_crash_repeatedly_is_given_up_and_bad_luck_is_not() -> None:
    story = Story()
    for _ in range(Policy().same_fingerprint):
        assert story.failures.hopeless() is None
        story.round(rank=0, code=-signal.SIGSEGV)
    cause = story.failures.hopeless()
    assert cause is not None
    assert not cause.may_retry
    assert "not started again: the same failure came back 2 times" in cause.message
    for story, code, elapsed_s in ((Story(), -signal.SIGKILL, 5.0), (Story(), -signal.SIGSEGV, 100.0)):
        for _ in range(5):
            story.round(rank=0, code=code, elapsed_s=elapsed_s)
        assert story.failures.hopeless() is None


def test_a_program_that_refuses_its_call_is_not_started_again() -> None:
    story = Story()
    story.failures.read_line(1, "ConfigurationError: n_embd must be a multiple of n_head")
    story.failures.read_line(1, "  - Look at the whole file")
    story.exited(1, 2)
    cause = story.failures.hopeless()
    assert cause is not None
    assert not cause.may_retry
    assert "n_embd must be a multiple" in cause.message


def test_a_run_that_left_as_asked_has_no_cause_and_one_that_was_killed_for_it_has() -> None:
    assert Story().failures.cause(1, asked_to_stop=True) is None
    killed = Story().failures.cause(-signal.SIGKILL, asked_to_stop=True)
    assert killed is not None
    assert killed.signal == "SIGKILL"
    assert Story().failures.cause(0, asked_to_stop=False) is None


def test_output_is_read_from_where_it_was_left_across_segments(tmp_path: Path) -> None:
    writer = OutputFile(tmp_path, segment_bytes=200, segments_kept=100)
    position = Position()
    texts: list[str] = []
    for number in range(60):
        writer.write([f"line {number}"], at_s=float(number), stream="stdout", rank=number % 2)
        if number % 7 == 0:
            piece = OutputReader(tmp_path, position).read(150)  # A new reader each time, as after a crash.
            texts += [line.text for line in piece.lines]
            assert piece.missed == 0
    writer.close()
    while lines := OutputReader(tmp_path, position).read(150).lines:
        texts += [line.text for line in lines]
    assert texts == [f"line {n}" for n in range(60)]
    assert len(list(tmp_path.glob("output-*"))) > 5


def test_a_flood_is_bounded_on_disk_and_what_is_missed_is_counted(tmp_path: Path) -> None:
    writer = OutputFile(tmp_path, segment_bytes=10_000, segments_kept=3)
    writer.write(["first"], at_s=0.0, stream="stderr", rank=None)
    reader = OutputReader(tmp_path, Position())
    assert [line.text for line in reader.read(1 << 20).lines] == ["first"]
    for number in range(5_000):
        writer.write([f"line {number}"], at_s=1.0, stream="stdout", rank=0)
    writer.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 50_000
    piece = reader.read(1 << 20)
    assert piece.missed > 0
    assert piece.missed + len(piece.lines) == 5_000
    assert piece.lines[-1].text == "line 4999"


def test_a_torn_line_waits_for_its_end_and_rubbish_is_passed_over(tmp_path: Path) -> None:
    writer = OutputFile(tmp_path)
    writer.write(["whole"], at_s=0.0, stream="stdout", rank=0)
    path = tmp_path / "output-000001.jsonl"
    reader = OutputReader(tmp_path, Position())
    with open(path, "ab") as file:
        file.write(b'[1.0, "stdout", 0, "ha')
    assert [line.text for line in reader.read(1 << 20).lines] == ["whole"]
    with open(path, "ab") as file:
        file.write(b'lf"]\nrubbish\n')
    writer.write(["after"], at_s=0.0, stream="stdout", rank=0)
    assert [line.text for line in reader.read(1 << 20).lines] == ["half", "after"]
    writer.close()


def test_an_agent_that_continues_after_it_was_given_up_is_stopped_again(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import signal, sys, time\n"
        "asked, said = [], 0\n"
        "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "while len(asked) < 2:\n"
        "    print('failed (exitcode: 1) local_rank: 0 (pid: 1)', file=sys.stderr, flush=True)\n"
        "    said += 1\n"
        "    time.sleep(0.1)\n"
        "print(said)\n"
        "sys.exit(1)\n"
    )
    supervisor = [sys.executable, "-m", "strata.launch.supervisor", str(tmp_path)]
    subprocess.run([*supervisor, sys.executable, str(agent)], timeout=120, check=True)
    cause = json.loads((tmp_path / "ended.json").read_text())["cause"]
    message = (
        "rank 0 ended with status 1 (not started again: the same failure came back 2 times and no step was "
        "completed in between)"
    )
    assert (cause["message"], cause["may_retry"]) == (message, False)
    said = [line.text for line in OutputReader(tmp_path, Position()).read(1 << 20).lines]
    total = int(next(text for text in said if text.isdecimal()))
    assert 3 <= sum(text.startswith("failed") for text in said) < total, (
        "what it says afterwards is of no use"
    )
    assert f"WARNING strata: given up: {cause['message']}" in said
