"""Workers from the fork server: as good as processes of their own, also when one dies at the worst moment."""

from __future__ import annotations

import atexit
import io
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import multiprocessing as torch_multiprocessing
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing import api as torch_api

from strata.agent import preload as preload_module
from strata.agent import warm
from strata.agent.preload import preload
from strata.agent.trace import forget_rendezvous
from strata.agent.warm import WarmWorkers
from strata.fork_server import ForkServer
from strata.shared_memory import make_private, run_folder
from strata.torch_compat.elastic import let_signals_through


@pytest.fixture(scope="module", autouse=True)
def _server_with_torch() -> None:
    preload()


_runs: list[str] = []


def new_run() -> str:
    _runs.append(f"test-{os.getpid()}-{time.monotonic_ns()}")
    return _runs[-1]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """What an agent does when its run ends."""
    yield
    for run in _runs:
        forget_rendezvous(run)
    _runs.clear()


def who_am_i(wait_s: float) -> int:
    time.sleep(wait_s)
    return os.getpid()


def make(tmp_path: Path, *args: Any, entrypoint: Callable[..., Any] = who_am_i) -> WarmWorkers:
    return WarmWorkers(
        name="test",
        entrypoint=entrypoint,
        args={0: args, 1: args},
        envs={0: {}, 1: {}},
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
    )


def test_one_that_is_killed_before_it_can_say_who_it_is_does_not_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = torch_multiprocessing.start_processes, list[psutil.Process]()

    def interrupted(*args: Any, **options: Any) -> Any:
        context = real(*args, **options)
        if not lost:
            lost.extend(map(psutil.Process, context.pids()))
            raise EOFError("unexpected EOF")
        return context

    monkeypatch.setattr(torch_multiprocessing, "start_processes", interrupted)
    context = make(tmp_path, 0.0)
    context.start()
    result = context.wait(timeout=60)
    context.close()
    assert result is not None
    assert set(result.return_values) == {0, 1}
    assert not any(process.is_running() for process in lost), (
        "the first ones must not train beside the second"
    )


def test_one_that_has_finished_is_not_waited_for_when_all_are_ended(tmp_path: Path) -> None:
    context = make(tmp_path, 0.0)
    context.start()
    while not all(not queue.empty() for queue in context._ret_vals.values()):
        time.sleep(0.02)  # Both have finished, and wait for the agent to take their results.
    began_s = time.monotonic()
    context.close()
    assert time.monotonic() - began_s < 25, "torch would wait 30 s and then kill them"


def leave(how: str, said: str) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    print(multiprocessing.get_start_method(), file=sys.stderr)
    atexit.register(print, "at exit", file=sys.stderr)
    if how == "sys.exit()":
        sys.exit()
    if how == "os._exit(0)":
        os._exit(0)
    if how == "Ctrl-C":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    raise ValueError("it went wrong")


@pytest.mark.parametrize(
    ("how", "codes"), [("sys.exit()", set()), ("os._exit(0)", set()), ("Ctrl-C", {130}), ("raise", {1})]
)
def test_a_script_leaves_the_way_it_would_leave_a_process_of_its_own(
    tmp_path: Path, how: str, codes: set[int]
) -> None:
    said = tmp_path / "said"
    context = make(tmp_path, how, str(said), entrypoint=leave)
    context.start()
    result = context.wait(timeout=60)
    context.close()
    assert result is not None
    assert {failure.exitcode for failure in result.failures.values()} == codes
    lines = said.read_text().splitlines()
    assert multiprocessing.get_start_method() in lines
    assert ("at exit" in lines) == (how != "os._exit(0)")
    assert ("ValueError: it went wrong" in lines) == (how == "raise")


def test_one_that_is_killed_after_it_has_finished_does_not_keep_the_agent(tmp_path: Path) -> None:
    context = make(tmp_path, 0.0)
    context.start()
    while not all(not queue.empty() for queue in context._ret_vals.values()):
        time.sleep(0.02)
    finished: Any = context._worker_finished_event
    asleep = finished._cond._sleeping_count
    while asleep.get_value() < 2:
        time.sleep(0.02)
    os.kill(context.pids()[0], signal.SIGKILL)
    assert context._pc is not None
    while context._pc.processes[0].exitcode is None:
        time.sleep(0.02)
    result = context.wait(timeout=60)
    assert result is not None
    assert {failure.exitcode for failure in result.failures.values()} == {-signal.SIGKILL}


def fail_when_told(told: str) -> None:
    while not os.path.exists(told):
        time.sleep(0.02)
    raise ConnectionError("the other rank is gone")


def test_the_one_that_was_killed_is_named_though_others_have_failed_for_want_of_it(tmp_path: Path) -> None:
    """On a busy machine the agent looks only when all of them have ended."""
    told = tmp_path / "told"
    context = make(tmp_path, str(told), entrypoint=fail_when_told)
    context.start()
    os.kill(context.pids()[1], signal.SIGKILL)
    told.touch()
    assert context._pc is not None
    while any(process.exitcode is None for process in context._pc.processes):
        time.sleep(0.02)
    result = context.wait(timeout=60)
    assert result is not None
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {1: -signal.SIGKILL}


def train(until: str, said: str, package: str) -> None:
    """What a script does: it imports things, makes an optimizer and steps."""
    began_s = time.monotonic()
    there = {name: name in sys.modules for name in ("torch._dynamo", *([package] if package else []))}
    sys.path.insert(0, str(Path(said).parent))
    import torch

    if package:
        __import__(package)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    Path(said).write_text(json.dumps([there, time.monotonic() - began_s]))
    while not os.path.exists(until):
        time.sleep(0.02)


def server_pid() -> int | None:
    server = ForkServer.current()
    return server.pid if server is not None else None


def life(tmp_path: Path, run: str, number: int, *, until_second: bool, package: str = "") -> list[Any]:
    until, said = tmp_path / f"until-{number}", tmp_path / f"said-{number}"
    context = WarmWorkers(
        name="test",
        entrypoint=train,
        args={0: (str(until), str(said), package)},
        envs={0: {"TORCHELASTIC_RUN_ID": run, "LOCAL_RANK": "0"}},
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
    )
    before = server_pid()
    context.start()
    # A second server imports everything, once more for each module that it leaves out.
    deadline_s = time.monotonic() + 400
    while not said.exists() or (until_second and server_pid() in (None, before)):
        assert context.wait(timeout=0.05) is None
        assert time.monotonic() < deadline_s
        before = before or server_pid()
    until.touch()
    assert context.wait(timeout=60) is not None
    context.close()
    found: list[Any] = json.loads(said.read_text())
    return found


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> preload_module.SecondServer:
    """An agent's own, as if it had just started."""
    fresh = preload_module.SecondServer()
    monkeypatch.setattr(warm, "_second", fresh)
    return fresh


@pytest.mark.timeout(900)
def test_workers_that_replace_others_begin_with_what_those_had_imported(
    tmp_path: Path, second: preload_module.SecondServer
) -> None:
    look = f"import sys, {', '.join(preload_module.EVERY_WORKER_NEEDS)}; sys.exit('torch._dynamo' in sys.modules)"
    if subprocess.run([sys.executable, "-c", look], check=False).returncode:
        pytest.skip(
            "this torch imports its compiler with everything else: a second server has nothing to add"
        )
    run = new_run()
    first, _ = life(tmp_path, run, 1, until_second=True)
    old = [psutil.Process(server.pid) for server in second._retired]
    again, _ = life(tmp_path, run, 2, until_second=False)
    assert (first["torch._dynamo"], again["torch._dynamo"]) == (False, True)
    assert old
    assert not any(process.is_running() for process in old), "nobody needs the first server any more"
    forget_rendezvous(run)
    assert not run_folder(run).exists()


@pytest.mark.timeout(900)
def test_a_module_that_starts_a_thread_is_left_out_and_the_rest_is_imported(
    tmp_path: Path,
    second: preload_module.SecondServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The package is installed where a second server finds it."""
    package = f"restless_{os.getpid()}"
    (tmp_path / f"{package}.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = new_run()
    names = [package, "torch._dynamo"]
    monkeypatch.setattr(second, "_take_note", lambda run: take_note(second, run, names))
    life(tmp_path, run, 1, until_second=True)
    again, _ = life(tmp_path, run, 2, until_second=False, package=package)
    assert again == {"torch._dynamo": True, package: False}
    assert f"importing {package} started a thread" in caplog.text


def take_note(second: preload_module.SecondServer, run: str, names: list[str]) -> None:
    folder = run_folder(run)
    make_private(folder, inside=folder.parent)
    (folder / "imports").write_text(json.dumps(names))
    preload_module.SecondServer._take_note(second, run)


def test_an_agent_that_comes_back_to_a_run_imports_what_was_proven_from_the_start() -> None:
    run = new_run()
    folder = run_folder(run)
    make_private(folder, inside=folder.parent)
    server: Any = forkserver._forkserver
    before = server._preload_modules
    try:
        preload_module._prove(run, ["torch._dynamo", "sympy"])
        preload(run)
        assert server._preload_modules[-2:] == ["torch._dynamo", "sympy"]
        forget_rendezvous(run)
        assert not folder.exists()
        preload(run)
        assert "sympy" not in server._preload_modules
    finally:
        server._preload_modules = before


ENDS_EARLY = """
import json, sys
from strata.agent.preload import SecondServer
from strata.shared_memory import make_private, run_folder
from strata.agent.trace import forget_rendezvous
run, when = sys.argv[1:]
folder = run_folder(run)
make_private(folder, inside=folder.parent)
(folder / "imports").write_text(json.dumps(["torch"]))
if when == "while a server imports":
    SecondServer().look(run)
assert list(folder.iterdir())
forget_rendezvous(run)
"""


@pytest.mark.parametrize("when", ["before it has looked", "while a server imports"])
def test_an_agent_whose_run_is_short_leaves_nothing_in_memory(when: str) -> None:
    run = new_run()
    done = subprocess.run([sys.executable, "-c", ENDS_EARLY, run, when], capture_output=True, timeout=170)
    assert (done.returncode, done.stderr) == (0, b"")
    assert not run_folder(run).exists()


def test_only_installed_modules_are_noted() -> None:
    installed = preload_module._is_installed
    assert installed("torch.optim")
    assert installed("strata.shared_memory")
    assert not installed("json")
    assert not installed(__name__)
    assert not installed("__main__")
    assert not installed("no.such.module")


def test_an_agent_that_is_asked_to_leave_while_it_logs_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Handler, "handleError", let_signals_through)

    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # The handler raises.
            return 0

    logger = logging.Logger("agent")
    logger.addHandler(logging.StreamHandler(Interrupted()))
    before = signal.signal(signal.SIGTERM, torch_api._terminate_process_handler)
    try:
        with pytest.raises(torch_api.SignalException):
            logger.error("a worker is lost")
    finally:
        signal.signal(signal.SIGTERM, before)
