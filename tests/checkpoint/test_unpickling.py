"""The quick way to open an image gives what torch's own way gives, and nothing else a pickle might ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata.checkpoint import CheckpointManager, Memory
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.manifest import TensorEntry
from strata.checkpoint.image.unpickling import open_own
from strata.stores import open_store
from tests.checkpoint.malicious import payloads, torch_file
from tests.checkpoint.states import assert_same, every_kind

NEED_OTHER_WORDS = ("complex", "mutable", "set", "counter", "size", "device")


def save(state: object, folder: Path, memory: Memory) -> tuple[Path, tuple[TensorEntry, ...]]:
    with CheckpointManager(folder, memory=memory) as manager:
        path = Path(manager.save(state, step=1).result().path)
    (entry,) = Catalog(open_store(folder)).list().entries
    return path, entry.manifest.tensors


def own_words() -> dict[str, Any]:
    state = {key: value for key, value in every_kind().items() if key not in NEED_OTHER_WORDS}
    bits = torch.arange(64, dtype=torch.uint8)
    state |= {"bits": bits, "as_floats": bits.view(torch.float32)[1:5]}
    state["linear"] = torch.nn.Linear(3, 2).state_dict()  # An OrderedDict with attributes of its own.
    return state


def memory_of(state: Any) -> list[tuple[int, int, int]]:
    """Of each tensor: which storage, numbered by first use, how large that is, and where in it the tensor begins."""
    numbers: dict[int, int] = {}
    found = []

    def visit(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            storage = node.untyped_storage()
            number = numbers.setdefault(storage.data_ptr(), len(numbers))
            found.append((number, storage.nbytes(), int(node.storage_offset())))
        elif isinstance(node, dict):
            for value in node.values():
                visit(value)
        elif isinstance(node, list | tuple):
            for value in node:
                visit(value)

    visit(state)
    return found


def test_it_gives_the_state_that_torch_gives(folder: Path, memory: Memory) -> None:
    path, entries = save(own_words(), folder, memory)
    quick, plain = open_own(path, entries), torch.load(path, weights_only=True, mmap=True)
    assert_same(quick, plain)
    assert memory_of(quick) == memory_of(plain)
    assert vars(quick["linear"]) == vars(plain["linear"])
    assert quick["model"]["weight"] is quick["model"]["tied"]
    assert quick["model"]["channels_last"].stride() == plain["model"]["channels_last"].stride()
    assert quick["model"]["parameter"].is_leaf


def test_what_is_written_to_a_loaded_tensor_stays_out_of_the_file(folder: Path, memory: Memory) -> None:
    path, entries = save({"x": torch.ones(5000)}, folder, memory)
    before = path.read_bytes()
    open_own(path, entries)["x"].zero_()
    assert path.read_bytes() == before


def test_a_state_that_needs_other_opcodes_is_left_to_torch(folder: Path, memory: Memory) -> None:
    for key in NEED_OTHER_WORDS:
        state = {key: every_kind()[key], "x": torch.ones(2)}
        path, entries = save(state, folder / key, memory)
        with pytest.raises(KeyError):
            open_own(path, entries)
        with CheckpointManager(folder / key, memory=memory) as manager:
            assert_same(manager.load(), state)


def test_a_manifest_of_another_file_does_not_fit(folder: Path, memory: Memory) -> None:
    path, (entry,) = save({"x": torch.ones(6, 7)}, folder, memory)
    for other in (
        entry._replace(shape=(7, 6)),
        entry._replace(dtype="int32"),
        entry._replace(dtype="no_such_type"),
        entry._replace(offset_bytes=path.stat().st_size - 8),
        entry._replace(offset_bytes=8),
    ):
        with pytest.raises((ValueError, AttributeError, RuntimeError, EOFError)):
            open_own(path, (other,))
    with pytest.raises(IndexError):
        open_own(path, ())


CHANGES_TO_WORDS = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n}X\x01\x00\x00\x00aK\x01sb.",
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\nN}X\x08\x00\x00\x00__call__K\x01s\x86b.",
    b"\x80\x02ccollections\nOrderedDict\n}X\x03\x00\x00\x00getK\x01sb.",
    b"\x80\x02ccollections\nOrderedDict\nN}X\x03\x00\x00\x00getK\x01s\x86b.",
    b"\x80\x02ctorch\nfloat32\n}X\x08\x00\x00\x00itemsizeK\x01sb.",
    b"\x80\x02ctorch\nTensor\n.",
    b"\x80\x02(c_codecs\nencode\nt.",
    b"\x80\x02ctorch\nTensor\n)R.",
    b"\x80\x02ctorch\nTensor\n)\x81.",
    b"\x80\x02ctorch.storage\nUntypedStorage\nK\x08\x85R.",
    b"\x80\x02c_codecs\nencode\nX\x04\x00\x00\x00rot1X\x05\x00\x00\x00rot13\x86R.",
    b"\x80\x04\x8c\x05torch\x8c\x12Tensor.__subclasses\x93.",
)


def test_no_pickle_gets_anything_else_from_it(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    hostile = {**payloads(canary), **{repr(each): each for each in CHANGES_TO_WORDS}}
    for name, data in hostile.items():
        path = tmp_path / "archive.pt"
        path.write_bytes(torch_file(data))
        with pytest.raises(Exception):  # noqa: B017 - whatever it is, torch decides then.
            print(name, open_own(path, ()))
        assert not canary.exists(), name
