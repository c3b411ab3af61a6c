"""A recoverable job through faults other than a killed rank: stops, errors, want of memory, loader processes, agents and networks."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

from strata import ElasticSampler
from strata.launch.cleanup import is_tracker
from strata.launch.coordinator import CoordinatorProcess
from tests.support import eventually, kill_together
from tests.support_network import network
from tests.support_proxy import Proxy
from tests.training.test_recoverable import (
    LIMIT_S,
    Job,
    assert_exact,
    assert_same,
    assert_survivors_stayed,
    held,
    inject,
    job,
    undisturbed,
    weights,
)

SAMPLES, BATCH = 4096, 32
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


def trained(steps: int) -> dict[str, torch.Tensor]:
    """What kind `ddp` ends with when every sample of so many steps was trained once."""
    sampler = ElasticSampler(SAMPLES, global_batch_size=BATCH, dataset="numbers", seed=5)
    weight, made = torch.zeros(4, dtype=torch.float64), 0
    while made < steps:
        sampler.set_epoch(made * BATCH // SAMPLES)
        for _, ids in sampler.batches():
            rows = [[float(number % 13), float(number % 7), 1.0, float(number)] for number in ids]
            weight -= torch.tensor(rows, dtype=torch.float64).sum(dim=0) / len(ids)
            made += 1
            if made == steps:
                break
    return {"module.weight": weight}


def assert_trained_once(running: Job, steps: int) -> None:
    assert_same(weights(running.folder), trained(steps))
    assert_exact(running.folder)


def survivors_continue(running: Job, *, without: int, world: int) -> None:
    """All others have entered a generation of this size."""
    running.await_line(lambda line: line.get("world") == world and line["pid"] != without, count=world)


# --- stopped ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_rank_stopped_beyond_its_deadline_is_replaced_and_the_others_continue(tmp_path: Path) -> None:
    with job(tmp_path / "job", "ddp", workers=3, steps=400, TIMEOUT_S="20", GROUP_TIMEOUT_S="20") as running:
        running.await_line(lambda line: "resumed" in line, count=3)
        stopped = running.living()[1]
        os.kill(stopped, signal.SIGSTOP)
        survivors_continue(running, without=stopped, world=2)
        running.finish()
    assert "Timed out waiting" in running.output()  # Why the others have left.
    assert "it did not leave within 20 s" in running.output()
    assert_survivors_stayed(running, {1: 1})
    assert_trained_once(running, 400)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("slot", [0, 2])
def test_stopped_rank_that_wakes_later_changes_nothing_and_joins_again(tmp_path: Path, slot: int) -> None:
    """Slot 0 kept the machine's snapshots when it was stopped."""
    with job(tmp_path / "job", "ddp", workers=3, steps=400, GROUP_TIMEOUT_S="20") as running:
        running.await_line(lambda line: "resumed" in line, count=3)
        stopped = running.living()[slot]
        os.kill(stopped, signal.SIGSTOP)
        survivors_continue(running, without=stopped, world=2)
        inject(running, 1, "if step >= 100: path.unlink(); (folder / 'is far').touch()")
        eventually((running.folder / "is far").exists, within_s=LIMIT_S)
        os.kill(stopped, signal.SIGCONT)
        running.await_line(lambda line: line["pid"] == stopped and line.get("resumed", 0) >= 100)
        running.finish()
    assert_survivors_stayed(running, {})
    assert_trained_once(running, 400)


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seen_by_others_first", [False, True])
def test_error_of_a_rank_is_the_first_thing_shown_with_its_rank_and_stack(
    tmp_path: Path, seen_by_others_first: bool
) -> None:
    """A rank may take its time to leave once its connections are closed."""
    slow = """
        import time, torch.distributed
        from strata.torch_compat import aborting
        def leave():
            aborting._shut_down(aborting._sockets())
            time.sleep(2)
        torch.distributed.destroy_process_group = leave
    """
    with job(tmp_path / "job", "ddp", workers=3, steps=100) as running:
        inject(
            running,
            2,
            f"""
            def innermost():
                raise ValueError("a bad batch")
            if step == 25:
                path.unlink()
                exec({textwrap.dedent(slow if seen_by_others_first else "")!r})
                innermost()
            """,
        )
        running.finish()
    shown = running.output()
    before, _, after = shown.partition("ValueError: a bad batch")
    assert after, shown
    assert before.startswith("[rank2]: Traceback")
    assert "in innermost" in before
    assert "resumed at step" not in before
    assert "rank 2 (" in after
    # What the others got is a consequence, and nobody needs to read it.
    assert "RuntimeError" not in shown
    assert shown.count("Traceback") == 1
    assert_survivors_stayed(running, {2: 1})
    assert_trained_once(running, 100)


@pytest.mark.timeout(600)
def test_error_after_recoveries_is_shown_with_the_present_rank_alone(tmp_path: Path) -> None:
    """Also that of a replacement, which has made a group by itself before."""
    with job(held(tmp_path / "job"), "ddp", workers=2, steps=600) as running:
        inject(running, 1, "import os\nif step == 25: path.unlink(); os.kill(os.getpid(), 9)")
        running.await_line(lambda line: line.get("world") == 2, count=4)
        fault = "raise ValueError('another bad batch') if not path.unlink() else None"
        inject(running, 0, fault)
        running.await_line(lambda line: line.get("world") == 2, count=6)
        inject(running, 1, fault)
        running.release()
        running.finish()
    shown = [line for line in running.output().splitlines() if "another bad batch" in line]
    assert [line for line in shown if line.startswith("[")] == [
        "[rank0]: ValueError: another bad batch",
        "[rank1]: ValueError: another bad batch",
    ], running.output()
    assert_survivors_stayed(running, {0: 1, 1: 2})
    assert_trained_once(running, 600)


# --- want of memory -----------------------------------------------------------------------------------------------


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group whose processes may use so much memory together."""
    group = MEMORY_GROUPS / f"strata-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"needs control groups (version 1) that limit memory: {error}")
    try:
        yield group
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text(), within_s=60)
        group.rmdir()


@pytest.mark.timeout(600)
def test_rank_that_the_kernel_kills_for_want_of_memory_is_replaced_and_the_reason_is_named(
    tmp_path: Path,
) -> None:
    with (
        memory_group(200_000_000) as group,
        job(tmp_path / "job", "ddp", workers=3, steps=150) as running,
    ):
        inject(
            running,
            1,
            f"""
            import os
            if step == 25:
                path.unlink()
                with open('{group}/cgroup.procs', 'w') as file:
                    file.write(str(os.getpid()))
                eaten = [bytearray(10_000_000) for _ in range(1_000)]
            """,
        )
        running.finish()
    assert "was killed by the kernel because memory ran out (SIGKILL)" in running.output()
    assert_survivors_stayed(running, {1: 1})
    assert_trained_once(running, 150)


@pytest.mark.timeout(600)
def test_rank_that_gets_no_more_memory_says_so_and_is_replaced(tmp_path: Path) -> None:
    with job(tmp_path / "job", "ddp", workers=3, steps=150) as running:
        inject(
            running,
            1,
            """
            import resource
            if step == 25:
                path.unlink()
                pages = int(open('/proc/self/statm').read().split()[0])
                limit = pages * resource.getpagesize() + 50_000_000
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                eaten = [bytearray(10_000_000) for _ in range(1_000)]
            """,
        )
        running.finish()
    before, _, after = running.output().partition("MemoryError")
    assert after, before
    assert before.startswith("[rank1]: Traceback")
    assert_survivors_stayed(running, {1: 1})
    assert_trained_once(running, 150)


# --- loader processes ---------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_rank_whose_loader_process_ends_says_so_and_is_replaced(tmp_path: Path) -> None:
    with job(held(tmp_path / "job"), "ddp", workers=3, steps=600, LOADER_PROCESSES="2") as running:
        running.await_line(lambda line: "resumed" in line, count=3)
        survivor = running.living()[0]
        (running.folder / "fault").write_text("1")
        (running.folder / "fault").rename(running.folder / "loader-fault")
        running.await_line(lambda line: line.get("world") == 3, count=6)
        running.await_line(lambda line: "resumed" in line, count=8)
        loaders = psutil.Process(survivor).children()
        running.release()
        running.finish()
    assert "DataLoader worker" in running.output()
    assert len(loaders) <= 2, loaders
    assert_survivors_stayed(running, {1: 1})
    assert_trained_once(running, 600)


# --- agents and all workers ---------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_all_workers_killed_at_once_are_started_again_from_memory(tmp_path: Path) -> None:
    with job(held(tmp_path / "job"), "ddp", workers=3, steps=300, SAVE_EVERY="1000") as running:
        inject(running, 0, "if step >= 120: path.unlink(); (folder / 'is far').touch()")
        eventually((running.folder / "is far").exists, within_s=LIMIT_S)
        kill_together(*running.living().values())
        running.release()
        running.finish()
    assert "killed by SIGKILL" in running.output()
    assert max(line.get("resumed", 0) for line in running.log()) >= 20  # Those after it may be under way.
    assert_trained_once(running, 300)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("server_is_stopped", [False, True], ids=["alone", "server-hangs"])
def test_workers_end_with_their_agent_and_the_next_one_continues(
    tmp_path: Path, server_is_stopped: bool
) -> None:
    """A fork server that hangs cannot end, and workers that end with it would be left."""
    with job(
        held(tmp_path / "job"), "ddp", workers=3, steps=400, LOADER_PROCESSES="1", SAVE_EVERY="1000"
    ) as running:
        inject(running, 0, "if step >= 120: path.unlink(); (folder / 'is far').touch()")
        eventually((running.folder / "is far").exists, within_s=LIMIT_S)
        below = psutil.Process(running.process.pid).children(recursive=True)
        assert set(running.living().values()) <= {process.pid for process in below}
        trackers = [process for process in below if is_tracker(process.pid)]
        servers = [p for p in below if p.ppid() == running.process.pid and p not in trackers]
        if server_is_stopped:
            for server in servers:
                server.suspend()
        running.process.kill()
        running.process.wait()
        left = [p for p in below if not server_is_stopped or p not in (*servers, *trackers)]
        try:
            psutil.wait_procs(left, timeout=60)
            assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        finally:
            for server in servers:
                with suppress(psutil.Error):
                    server.kill()
            # When all others have ended, they remove their semaphores.
            psutil.wait_procs(trackers, timeout=60)
    running.release()
    with job(tmp_path / "job", "ddp", workers=3, steps=400) as running:
        running.finish()
    assert max(line.get("resumed", 0) for line in running.log()) >= 20  # Those after it may be under way.
    assert_trained_once(running, 400)


# --- sharded state ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_sharded_job_is_the_same_bit_for_bit_after_a_stop_an_error_and_a_kill(
    tmp_path: Path, kind: str
) -> None:
    wanted = undisturbed(tmp_path / "undisturbed", kind, workers=2, steps=120)
    with job(tmp_path / "job", kind, workers=2, steps=120) as running:
        inject(running, 1, "import os\nif step == 27: path.unlink(); os.kill(os.getpid(), 9)")
        inject(running, 0, "if step == 63: path.unlink(); raise ValueError('a bad batch')")
        running.finish()
    assert "was killed by SIGKILL" in running.output()
    assert "ValueError: a bad batch" in running.output()
    assert_same(weights(running.folder), wanted)
    assert_exact(running.folder)
    assert_survivors_stayed(running, {0: 1, 1: 1})
    assert {line["world"] for line in running.log() if "world" in line} == {2}


# --- replicated state of a world that changes -----------------------------------------------------------------------


def schedule(running: Job, steps: int) -> list[tuple[int, int, int]]:
    """Which world has made which steps that were kept, by what rank 0 has said."""
    found: list[tuple[int, int, int]] = []
    worlds: dict[int, int] = {}
    for line in running.log():
        if "world" in line:
            worlds[line["pid"]] = line["world"] if line["rank"] == 0 else 0
        elif "resumed" in line and worlds[line["pid"]]:
            first = line["resumed"]
            found = [(world, start, min(end, first)) for world, start, end in found if start < first]
            found.append((worlds[line["pid"]], first, steps))
    return found


@pytest.mark.timeout(600)
def test_parameters_are_those_of_a_run_with_the_same_worlds_bit_for_bit(tmp_path: Path) -> None:
    """Where they depend on who computed what: sums of three ranks are not those of two."""
    steps = 200
    with job(tmp_path / "job", "adam", workers=3, steps=steps) as running:
        for number, at in enumerate((25, 60, 95)):
            inject(running, number, f"import os\nif step >= {at}: path.unlink(); os.kill(os.getpid(), 9)")
        running.finish()
    followed = schedule(running, steps)
    assert {world for world, _, _ in followed} >= {2, 3}, followed
    assert sum(end - first for _, first, end in followed) == steps, followed
    with job(tmp_path / "again", "adam", workers=3, steps=steps, SCHEDULE=json.dumps(followed)) as again:
        again.finish()
    assert_same(weights(running.folder), weights(again.folder))
    with job(tmp_path / "other", "adam", workers=3, steps=steps, SCHEDULE=f"[[3, 0, {steps}]]") as other:
        other.finish()
    with pytest.raises(AssertionError):
        assert_same(weights(running.folder), weights(other.folder))
    assert_exact(running.folder)


# --- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_machine_that_is_cut_off_is_left_behind_and_joins_again_when_the_network_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_HEARTBEAT_TIMEOUT", "5")
    folder, cut = tmp_path / "job", 2
    folder.mkdir()
    (folder / "slow").touch()
    (folder / "faults-0").write_text("import time\nif (folder / 'slow').exists(): time.sleep(0.2)")
    coordinator = CoordinatorProcess(tmp_path / "coordinator")
    with (
        network(3) as lan,
        ExitStack() as stack,
    ):
        stack.callback(coordinator.stop)
        coordinator.start()
        proxy = stack.enter_context(Proxy(coordinator.grpc_port, host=lan.here))
        machines = [
            stack.enter_context(
                job(
                    folder,
                    "ddp",
                    workers=1,
                    steps=1500,
                    flags=[
                        *("--nnodes=1:3", f"--rdzv-endpoint={proxy.address}", "--rdzv-id=three"),
                        f"--local-addr={lan.address(number)}",
                    ],
                    namespace=lan.namespace(number),
                    memory=str(tmp_path / f"memory-{number}"),
                    MACHINE=str(number),
                    GLOO_SOCKET_IFNAME="eth0",
                )
            )
            for number in range(3)
        ]
        running = machines[0]
        running.await_line(lambda line: line.get("world") == 3, count=3)
        running.await_line(lambda line: "resumed" in line, count=3)
        lan.cut(cut)
        running.await_line(lambda line: line.get("world") == 2 and line["machine"] != str(cut), count=2)
        lan.heal(cut)
        running.await_line(lambda line: line.get("world") == 3, count=6)
        (folder / "slow").unlink()
        for machine in machines:
            machine.finish()
    pids = {
        number: {line["pid"] for line in running.log() if line["machine"] == str(number)}
        for number in range(3)
    }
    replaced = running.output().count("and is replaced")
    assert sum(map(len, pids.values())) <= 3 + replaced, running.output()
    assert_trained_once(running, 1500)
