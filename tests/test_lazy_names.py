"""A package's names load on first use, and then they are there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest


def test_a_name_loads_on_first_use_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "lazy_parcel"
    folder.mkdir()
    (folder / "parts.py").write_text("class Wheel: ...")
    (folder / "__init__.py").write_text(
        "from strata.lazy_names import lazy_names\n"
        "__getattr__, __dir__ = lazy_names(__name__, {'Wheel': '.parts', 'parts': '.parts', 'sqrt': 'math'})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    parcel = importlib.import_module("lazy_parcel")
    try:
        assert {"Wheel", "parts", "sqrt"} <= set(dir(parcel))
        assert "lazy_parcel.parts" not in sys.modules
        assert parcel.Wheel is sys.modules["lazy_parcel.parts"].Wheel
        assert parcel.parts is sys.modules["lazy_parcel.parts"]
        assert parcel.sqrt(4) == 2
        assert {"Wheel", "sqrt"} <= vars(parcel).keys()
        with pytest.raises(AttributeError, match="module 'lazy_parcel' has no attribute 'other'"):
            parcel.other  # noqa: B018
    finally:
        del sys.modules["lazy_parcel"]
        sys.modules.pop("lazy_parcel.parts", None)
