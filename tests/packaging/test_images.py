"""The container images are really built, and what is in them is run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support_programs import program, programs, require_root

import build_images  # isort: skip  # Beside the table of programs, which makes its folder known.

SCRIPT = Path(programs.__file__).parent / "build_images.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_images_are_built_and_the_coordinator_runs_from_its_own(tmp_path: Path) -> None:
    """From Debian's packages, so that no registry is needed."""
    require_root("images are built without an engine")
    program("buildah")
    program("debootstrap")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--from-debian", "--storage", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1790,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the coordinator runs from its image: ok, with dashboard" in done.stdout
    assert "torchrun runs from the worker's image: torch " in done.stdout


def test_local_folders_in_pips_configuration_are_passed_to_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, index = tmp_path / "wheels", tmp_path / "index" / "simple"
    wheels.mkdir()
    index.mkdir(parents=True)
    configuration = tmp_path / ".config" / "pip" / "pip.conf"
    configuration.parent.mkdir(parents=True)
    configuration.write_text(
        f"[global]\nfind-links = {wheels}\nextra-index-url = https://host/simple file://{index}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    lent = build_images.lent_files()
    assert f"{configuration}:{build_images.HOME / '.config/pip/pip.conf'}:ro" in lent
    assert f"{wheels}:{wheels}:ro" in lent
    assert f"{index.parent}:{index.parent}:ro" in lent, "the files of an index lie beside its pages"
    assert not any("host" in mount for mount in lent)


def test_an_unknown_image_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["build_images.py", "dashboard"])
    with pytest.raises(SystemExit) as end:
        build_images.main()
    assert end.value.code == 2
    assert "there is no image dashboard; there are coordinator and worker" in capsys.readouterr().err
