"""The state of another tool as the first checkpoint of a run.

    adopt("llama/", "runs/a")                    a Hugging Face folder
    adopt("old/last.pt", "s3://bucket/run")      what torch.save has written, with its optimizer and step where they are there
    adopt("dcp/step-500", "runs/b", step=500)    a folder of dcp.save

The result is a sharded checkpoint, which a job of any world size starts from: the tensors' bytes are as they were, the names
are those of the plain model. They go through in pieces: whatever the size of the model, buffers take a fixed amount of
memory. Nothing in a file runs. A destination that has a checkpoint is refused, and until the manifest is there nothing is.

What a file holds is recognised by its keys: a training state of ours, one under the names that other tools use, or weights
alone. An optimizer's state that counts its parameters is turned into one that names them, where it is certain which is which;
otherwise it is left out, and said to be.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strata.checkpoint.catalog.lineage import place_next
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.manifest import SHARDED, SUFFIX, Manifest
from strata.checkpoint.catalog.naming import MODEL, OPTIMIZER, SCHEDULER, new_id
from strata.checkpoint.catalog.publish import commit
from strata.checkpoint.catalog.runs import read_record
from strata.checkpoint.errors import CheckpointError, Damaged, LoadFailed, SaveFailed
from strata.core.jobs.lineage import Lineage
from strata.errors import MissingDependency
from strata.stores import open_store
from strata.stores.protocol import Store, StoreError
from strata.torch_compat.wrappers import WRAPPERS, is_extra_state, plain_name

if TYPE_CHECKING:
    from strata.checkpoint.formats.lazy import LazyTensor, Memory
    from strata.checkpoint.formats.reading import Folder
    from strata.checkpoint.sharded.parts import PartWriter

_MODELS = ("state_dict", "model", "module", "model_state", "net", "weights")
_OPTIMIZERS = (OPTIMIZER, "optimizer", "optim", "optimizer_states")
_SCHEDULERS = (SCHEDULER, "lr_scheduler", "scheduler", "scheduler_state_dict", "lr_schedulers")
_STEPS = ("step", "global_step", "iteration")
_LIKE_PARAMETER = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "exp_inf",
    }
)
"""Entries of torch's optimizers that have the shape of their parameter."""
_BUFFERS = ("running_mean", "running_var")
"""What torch's modules keep as buffers of numbers, beside parameters of the same shape."""
_PART_BYTES = 4 << 30
_AUTHOR = "import"


class InvalidImport(CheckpointError, ValueError):
    """What was asked for cannot be imported so. Nothing has been written."""

    code = "invalid_import"


class DestinationTaken(CheckpointError):
    """The destination has checkpoints already. Nothing has been written."""

    code = "destination_taken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    path: str
    checkpoint_id: str
    step: int
    format: str
    """Of what was imported."""
    tensors: int
    size_bytes: int
    has_optimizer: bool
    notes: tuple[str, ...] = ()
    """How the file was understood, in sentences."""
    left_out: tuple[str, ...] = ()
    """What was in it and is not in the checkpoint."""


def adopt(
    path: str,
    to: str,
    *,
    step: int | None = None,
    memory_bytes: int | None = None,
) -> Imported:
    """Make what is at `path` the first checkpoint in `to`: a `.pt` or safetensors file, or a Hugging Face or DCP folder. The
    step is 0, or what the file says."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("torch", extra="torch", feature="Importing a checkpoint")
    from strata.checkpoint.formats.lazy import MEMORY_BYTES, LazyTensor, Memory, flatten

    store = open_store(to)
    catalog = Catalog(store)
    _check_free(catalog)
    memory = Memory(limit_bytes=memory_bytes or MEMORY_BYTES)
    try:
        state, format = _opened(path, memory)
    except Damaged as error:
        error.hint = "Nothing was imported. Copy it again from its source."
        raise
    found = _Recognised.of(state, path)
    step = found.step(step)
    found.state |= {"step": step, "epoch": found.epoch()}
    values, paths = flatten(found.state, keep_keys=True)
    _check_names(values, path)
    found.left_out += _encode_objects(values)
    manifest = _publish(catalog, values, paths, step=step, epoch=found.epoch(), format=format)
    return Imported(
        path=to,
        checkpoint_id=manifest.checkpoint_id,
        step=step,
        format=format,
        tensors=sum(isinstance(value, LazyTensor) for value in values.values()),
        size_bytes=manifest.size_bytes,
        has_optimizer=OPTIMIZER in found.state,
        notes=tuple(found.notes),
        left_out=tuple(found.left_out),
    )


def _check_names(names: Iterable[str], path: str) -> None:
    """Half a character can be in a file, but not in a manifest."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidImport(f"'{path}' has a name that is not text: {name!a}.") from None


def _encode_objects(values: dict[str, Any]) -> list[str]:
    """Turn what is no tensor into bytes that a safe load reads. Removes and returns what has none."""
    import torch

    from strata.checkpoint.formats.lazy import LazyTensor, loaded
    from strata.checkpoint.sharded.reader import load_object

    left_out = []
    for name, value in list(values.items()):
        if isinstance(value, LazyTensor):
            continue
        raw = io.BytesIO()
        torch.save(loaded(value), raw)
        try:
            load_object(raw.getvalue(), name=name)
        except LoadFailed:
            left_out.append(name)
            del values[name]
        else:
            values[name] = raw.getbuffer()
    return left_out


def _check_free(catalog: Catalog) -> None:
    listing = catalog.list(fresh=True)
    if not listing.entries and not listing.problems:
        return
    url = catalog.store.url
    what = (
        f"step {listing.entries[0].manifest.step:,} is the newest" if listing.entries else "it cannot be read"
    )
    raise DestinationTaken(
        f"{url} has checkpoints already ({what}): an import must start a run.",
        hint="Import into an empty folder, or remove what is there with `strata checkpoint rm`.",
    )


# --- reading --------------------------------------------------------------------------------------------------


def _opened(path: str, memory: Memory) -> tuple[Any, str]:
    """The state at a path, its tensors still in place, and what it was."""
    from strata.checkpoint.formats import reading
    from strata.checkpoint.formats.lazy import LocalFile, StoredFile

    local = path.removeprefix("file://")
    if "://" in local:
        folder, _, name = path.rstrip("/").rpartition("/")
        store = open_store(folder)
        blob = store.stat(name)
        if blob is not None:
            return _opened_file(StoredFile(store, name, size_bytes=blob.size_bytes), memory)
        return _opened_folder(reading.StoreFolder(open_store(path)), path, memory)
    try:
        if os.path.isdir(local):
            return _opened_folder(reading.LocalFolder(local), local, memory)
        if not os.path.exists(local):
            raise InvalidImport(f"'{path}' does not exist.", hint="Pass a file, or a folder with a model.")
        return _opened_file(LocalFile(local), memory)
    except OSError as error:
        raise LoadFailed(f"'{path}' could not be read: {error.strerror or error}.") from error


def _opened_file(file: Any, memory: Memory) -> tuple[Any, str]:
    from strata.checkpoint.formats import reading

    if file.name.endswith(".safetensors") or reading.is_safetensors(file):
        return reading.open_safetensors(file, memory=memory), "safetensors"
    return reading.open_pt(file, memory=memory), "pt"


def _opened_folder(folder: Folder, path: str, memory: Memory) -> tuple[Any, str]:
    from strata.checkpoint.formats import reading

    if folder.file(reading.DCP_METADATA) is not None:
        return reading.open_dcp(folder, memory=memory), "dcp"
    weights = reading.open_hf(folder, memory=memory)
    if weights is not None:
        return weights, "hf"
    names = folder.names()
    if any(name.endswith(SUFFIX) for name in names):
        from strata.checkpoint.export import find, open_state

        return open_state(*find(path), memory=memory), "strata"
    raise InvalidImport(
        f"'{path}' holds no checkpoint of a known format.",
        hint="A folder written by dcp.save has '.metadata'; a Hugging Face folder has 'model.safetensors' or an index of "
        "several.",
    )


# --- understanding --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Recognised:
    """A state under the names that a job uses."""

    state: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, state: Any, path: str) -> _Recognised:
        if not isinstance(state, Mapping):
            raise InvalidImport(f"'{path}' holds a {type(state).__name__}, not a state dictionary.")
        if isinstance(state.get(MODEL), Mapping):
            found = cls(dict(state))
            if OPTIMIZER not in state:
                found.notes.append("It has no optimizer: training starts with a fresh one.")
        elif _is_weights(state) and any(name.startswith(f"{MODEL}.") for name in state):
            found = cls._of_flat(state)
        elif _is_weights(state):
            found = cls(
                {MODEL: dict(state)}, ["It holds weights alone: training starts with a fresh optimizer."]
            )
        else:
            found = cls._of_foreign(state, path)
        found.state[MODEL] = found._plain_names(found.state[MODEL])
        found._name_optimizer()
        return found

    @classmethod
    def _of_flat(cls, state: Mapping[str, Any]) -> _Recognised:
        """Tensors of a training state under their dotted names: where keys end is known of the model's alone."""
        found = cls({MODEL: {}}, ["It has no optimizer that can be read: training starts with a fresh one."])
        for name, value in state.items():
            key, _, rest = name.partition(".")
            if key == MODEL:
                found.state[MODEL][rest] = value
            elif key not in found.left_out:
                found.left_out.append(key)
        return found

    @classmethod
    def _of_foreign(cls, state: Mapping[Any, Any], path: str) -> _Recognised:
        key = next((key for key in _MODELS if _is_weights(state.get(key))), None)
        if key is None:
            known = ", ".join(str(name) for name in list(state)[:8]) or "nothing"
            raise InvalidImport(
                f"'{path}' holds no model that is recognised. It has: {known}.",
                hint="Save the weights as a flat dictionary, or under 'model_state_dict'.",
            )
        found = cls({MODEL: dict(state[key])}, [f"The model is taken from '{key}'."])
        used = {key}
        for name, keys in ((OPTIMIZER, _OPTIMIZERS), (SCHEDULER, _SCHEDULERS)):
            for key in keys:
                value = state.get(key)
                if isinstance(value, list) and len(value) == 1:
                    value = value[0]
                if isinstance(value, Mapping) and value:
                    found.state[name] = value
                    found.notes.append(f"'{key}' becomes '{name}'.")
                    used.add(key)
                    break
        if OPTIMIZER not in found.state:
            found.notes.append("It has no optimizer: training starts with a fresh one.")
        for name, counts in (("step", _STEPS), ("epoch", ("epoch",))):
            for key in counts:
                if _is_count(state.get(key)):
                    found.state.setdefault(name, state[key])
                    used.add(key)
        found.left_out += [str(key) for key in state if key not in used]
        return found

    def step(self, wanted: int | None) -> int:
        """The step asked for, or that of the file."""
        return wanted if wanted is not None else self._count("step")

    def epoch(self) -> int:
        return self._count("epoch")

    def _count(self, name: str) -> int:
        value = self.state.get(name)
        return value if isinstance(value, int) and _is_count(value) else 0

    def _plain_names(self, model: Mapping[Any, Any]) -> dict[str, Any]:
        """The names of the model without what wraps it."""
        renamed = {str(name): value for name, value in model.items()}
        while renamed and all(name.startswith("module.") for name in renamed):
            renamed = {name.removeprefix("module."): value for name, value in renamed.items()}
            self._note("The prefix 'module.' of names is dropped.")
        for wrapper in WRAPPERS:
            if any(wrapper in name.split(".") for name in renamed):
                self._note(f"'{wrapper}.' is dropped from names.")
        plain = {plain_name(name): value for name, value in renamed.items()}
        if len(plain) < len(renamed):
            raise InvalidImport("Two of the model's tensors would have the same name without their wrappers.")
        return plain

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _name_optimizer(self) -> None:
        """Let the optimizer's state name its parameters, or leave it out."""
        saved = self.state.get(OPTIMIZER)
        if saved is None:
            self.state.pop(OPTIMIZER, None)
            return
        try:
            self.state[OPTIMIZER] = _named_optimizer(saved, self.state[MODEL])
        except _Unknown as reason:
            del self.state[OPTIMIZER]
            self.left_out.append(OPTIMIZER)
            self.notes.append(
                f"The optimizer's state is left out: {reason}. Training starts with a fresh one."
            )


def _is_weights(value: Any) -> bool:
    """Tensors by name, and what modules keep beside them."""
    from strata.checkpoint.formats.lazy import LazyTensor

    return (
        isinstance(value, Mapping)
        and any(isinstance(each, LazyTensor) for each in value.values())
        and all(
            isinstance(name, str) and (isinstance(each, LazyTensor) or is_extra_state(name))
            for name, each in value.items()
        )
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


class _Unknown(Exception):
    """Why it is not certain which parameter an entry belongs to."""


def _named_optimizer(saved: Any, model: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by the names of parameters, as `torch.distributed.checkpoint.state_dict` gives it."""
    if not isinstance(saved, Mapping):
        raise _Unknown("it is not a dictionary")
    groups = saved.get("param_groups")
    entries = saved.get("state", {})
    entries = dict(enumerate(entries)) if isinstance(entries, list) else entries
    if not isinstance(groups, list | tuple) or not isinstance(entries, Mapping):
        raise _Unknown("it has no 'state' and 'param_groups'")
    members: list[list[Any]] = []
    for group in groups:
        params = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(params, list | tuple):
            raise _Unknown("its groups do not list their parameters")
        members.append(list(params))
    by_key = {_key(key): value for key, value in entries.items() if value is not None}
    names = _names_of(groups, members, by_key, model)
    if unknown := [key for key in by_key if key not in names]:
        raise _Unknown(f"it has an entry '{unknown[0]}' that is in no group")
    return {
        "state": {names[key]: value for key, value in by_key.items()},
        "param_groups": [
            {
                **{name: value for name, value in group.items() if name != "param_names"},
                "params": [names[_key(each)] for each in params],
            }
            for group, params in zip(groups, members, strict=True)
        ],
        **{key: value for key, value in saved.items() if key not in ("state", "param_groups")},
    }


def _key(key: Any) -> int | str:
    """A number, also one that a flat format has turned into text; or a name."""
    return (
        int(key) if type(key) is int or str(key).isdecimal() else plain_name(str(key)).removeprefix("module.")
    )


def _names_of(
    groups: Sequence[Any],
    members: Sequence[Sequence[Any]],
    entries: Mapping[Any, Any],
    model: Mapping[str, Any],
) -> dict[int | str, str]:
    """The name of each parameter of the groups."""
    from strata.checkpoint.formats.lazy import LazyTensor

    names: dict[int | str, str] = {}
    for group, params in zip(groups, members, strict=True):
        keys = [_key(each) for each in params]
        if all(isinstance(key, str) for key in keys):
            chosen = [str(key) for key in keys]
        elif isinstance(group.get("param_names"), list | tuple) and len(group["param_names"]) == len(keys):
            chosen = [str(_key(name)) for name in group["param_names"]]
        else:
            chosen = _in_order([_shape_of(entries.get(key)) for key in keys], model, sum(map(len, members)))
        if missing := [name for name in chosen if not isinstance(model.get(name), LazyTensor)]:
            raise _Unknown(f"the model has no '{missing[0]}'")
        for key, name in zip(keys, chosen, strict=True):
            shape = _shape_of(entries.get(key))
            if key in names or name in names.values():
                raise _Unknown(f"'{name}' would be in it twice")
            if shape is not None and shape != model[name].shape:
                raise _Unknown(f"an entry for '{name}' is of another shape")
            names[key] = name
    return names


def _shape_of(entry: Any) -> tuple[int, ...] | None:
    """The shape of the parameter that an entry belongs to, where it tells."""
    from strata.checkpoint.formats.lazy import LazyTensor

    for name, value in entry.items() if isinstance(entry, Mapping) else ():
        if name in _LIKE_PARAMETER and isinstance(value, LazyTensor):
            return value.shape
    return None


def _in_order(shapes: Sequence[tuple[int, ...] | None], model: Mapping[str, Any], count: int) -> list[str]:
    """The parameters of a group, which are in the order of the model's: those of these shapes, where there is one way."""
    from strata.checkpoint.formats.lazy import LazyTensor

    tied: set[Any] = set()
    candidates: list[tuple[str, LazyTensor]] = []
    for name, value in model.items():
        is_number = isinstance(value, LazyTensor) and (
            value.dtype.is_floating_point or value.dtype.is_complex
        )
        is_number = is_number and name.rpartition(".")[2] not in _BUFFERS
        if is_number and value.identity not in tied:
            tied.add(value.identity)  # A tied parameter is one, under its first name.
            candidates.append((name, value))
    first = _matched(shapes, candidates)
    last = _matched(list(reversed(shapes)), list(reversed(candidates)))
    if first is None or last is None:
        raise _Unknown("its entries have other shapes than the model's tensors")
    if first != last[::-1]:
        raise _Unknown(
            f"its {count} parameters could be any of {len(candidates)} tensors, and it does not name them"
        )
    return first


def _matched(
    shapes: Sequence[tuple[int, ...] | None], candidates: Sequence[tuple[str, LazyTensor]]
) -> list[str] | None:
    """Each shape's first candidate after that of the shape before."""
    remaining = iter(candidates)
    found = []
    for shape in shapes:
        name = next((name for name, tensor in remaining if shape in (None, tensor.shape)), None)
        if name is None:
            return None
        found.append(name)
    return found


# --- writing --------------------------------------------------------------------------------------------------


def _publish(
    catalog: Catalog,
    values: Mapping[str, Any],
    paths: Mapping[str, Any],
    *,
    step: int,
    epoch: int,
    format: str,
) -> Manifest:
    from torch.distributed.checkpoint.metadata import Metadata

    from strata.checkpoint.sharded.layout import encode
    from strata.checkpoint.sharded.listing import key_of
    from strata.checkpoint.sharded.parts import remember_named, remove_orphans

    store = catalog.store
    with _raised_as_save(store, step):
        record = read_record(store)
        remove_orphans(catalog)
        with _Writer(store, step) as writer:
            for group in _grouped(values):
                writer.write_part(group)
            parts = writer.parts
            keys = [part.key for part in parts]
            draft = Manifest(
                checkpoint_id=new_id(step),
                step=step,
                epoch=epoch,
                created_at=time.time(),
                format=SHARDED,
                parts=tuple(part.part for part in parts),
                layout=encode(
                    Metadata(
                        state_dict_metadata=writer.entries,
                        planner_data={name: paths[name] for name in values},
                    ),
                    writer.spans,
                ),
                metadata={"imported": format},
                author=_AUTHOR,
            )

            def complete() -> Manifest:
                _check_free(catalog)
                return place_next(Lineage(run=record.run if record is not None else ""), draft)

            writer.keep()  # From here on the publisher knows whether they may be removed.
            manifest = commit(store, draft.checkpoint_id, complete, at=key_of(draft), payload=keys).manifest
        remember_named(store, keys)
        return manifest


class _Writer:
    """Writes the parts of one checkpoint, a value at a time, and removes them again unless they are kept."""

    def __init__(self, store: Store, step: int) -> None:
        self.entries: dict[str, Any] = {}
        self.spans: dict[Any, Any] = {}
        self._store = store
        self._step = step
        self._part: PartWriter | None = None
        self.parts: list[Any] = []
        self._known: dict[Any, Any] = {}
        self._is_kept = False

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        from strata.checkpoint.sharded.parts import forget

        if self._part is not None:
            self._part.abort()
        if self._is_kept:
            return
        forget(self._store, [part.key for part in self.parts])
        for part in self.parts:
            with contextlib.suppress(StoreError):
                self._store.delete(part.key)

    def keep(self) -> None:
        self._is_kept = True

    def write_part(self, values: Mapping[str, Any]) -> None:
        from strata.checkpoint.sharded.parts import PartWriter

        self._part = PartWriter(self._store, self._step, size_hint_bytes=sum(map(_size_of, values.values())))
        for name, value in values.items():
            if isinstance(value, memoryview):
                self._add_object(name, value)
            else:
                self._add_tensor(name, value)
        part, self._part = self._part, None
        self.parts.append(part.finish())

    def _add_tensor(self, name: str, tensor: LazyTensor) -> None:
        import torch
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )

        shape = torch.Size(tensor.shape)
        origin = torch.Size([0] * len(shape))
        self.entries[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad),
            size=shape,
            chunks=[ChunkStorageMetadata(offsets=origin, sizes=shape)],
        )
        if tensor.identity not in self._known:  # Tied tensors are stored once, under all their names.
            self._known[tensor.identity] = self._store_pieces(tensor.pieces())
        self.spans[MetadataIndex(name, origin)] = self._known[tensor.identity]

    def _add_object(self, name: str, raw: memoryview) -> None:
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

        self.entries[name] = BytesStorageMetadata()
        self.spans[MetadataIndex(name)] = self._store_pieces(iter([raw]))

    def _store_pieces(self, pieces: Iterator[memoryview]) -> Any:
        from strata.checkpoint.sharded.parts import Span

        assert self._part is not None
        offset_bytes, size_bytes = self._part.add(next(pieces, memoryview(b"")))
        for piece in pieces:
            self._part.extend(piece)
            size_bytes += len(piece)
        return Span(part=len(self.parts), offset_bytes=offset_bytes, size_bytes=size_bytes)


def _grouped(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """By the parts they go to, which are read in parallel."""
    group: dict[str, Any] = {}
    filled_bytes = 0
    for name, value in values.items():
        if group and filled_bytes + _size_of(value) > _PART_BYTES:
            yield group
            group, filled_bytes = {}, 0
        group[name] = value
        filled_bytes += _size_of(value)
    yield group


def _size_of(value: Any) -> int:
    size_bytes = len(value) if isinstance(value, memoryview) else value.size_bytes
    return int(-(-size_bytes // 64) * 64)


@contextlib.contextmanager
def _raised_as_save(store: Store, step: int) -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        path = f"{store.url}/{error.key}".rstrip("/")
        raise SaveFailed.because(error, tier=store.tier, path=path, checkpoint_id="", step=step) from None
