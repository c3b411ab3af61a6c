"""Files of other tools as lazy states: `.pt`, safetensors, Hugging Face folders, DCP folders, and images.

Nothing in a file runs: pickles are read by `torch.load(weights_only=True)`, DCP's metadata by an unpickler that knows the few
types it is made of. A name in an index never leaves its folder. What is cut short, foreign or contradicts itself raises
`Damaged` or `LoadFailed` with a sentence. Tensor bytes are not touched until they are asked for: of a `.pt` file only the
pickle and the zip's directory are read, from which torch makes tensors over memory that has no pages.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import IO, Any, Protocol

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from strata.checkpoint.catalog.manifest import Manifest
from strata.checkpoint.errors import Damaged, LoadFailed, UnsupportedState
from strata.checkpoint.formats.lazy import (
    Bytes,
    Chunk,
    InMemory,
    LazyTensor,
    LocalFile,
    Memory,
    Record,
    Region,
    StoredFile,
    Stretch,
    check_plain,
    held,
    in_file,
    nest,
    read_bytes,
)
from strata.checkpoint.image.nested import dotted, leaves
from strata.checkpoint.image.pickling import TensorRecipe
from strata.checkpoint.image.plain import check_records
from strata.checkpoint.image.reading import open_image as open_in_memory
from strata.checkpoint.image.state import rebuild
from strata.checkpoint.image.unpickling import check_recipe, head_bytes, put_in_place, read_outline
from strata.checkpoint.sharded.reader import load_object
from strata.files import RangeFile
from strata.stores.protocol import Store
from strata.torch_compat.checkpoints import PRIVATE_GLOBALS, MemoryFormat

SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
VALUES, PATHS = "strata.values", "strata.paths"
"""What an export adds to the metadata of a safetensors file: values that are no tensors, and how names were made."""
DCP_METADATA = ".metadata"
HF_INDEX = "model.safetensors.index.json"
HF_INDEXES = (HF_INDEX, "pytorch_model.bin.index.json")
HF_FILES = ("model.safetensors", "pytorch_model.bin")
_MOST_HEADER_BYTES = 100_000_000  # As the safetensors library has it.
_SMALL_BYTES = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_DATA = re.compile(r"[^/]+/data/\d+")


class Folder(Protocol):
    """Where the files of a folder are read from."""

    @property
    def name(self) -> str: ...

    def file(self, name: str) -> Bytes | None: ...

    def names(self) -> list[str]: ...


class LocalFolder:
    def __init__(self, path: str) -> None:
        self.name = path

    def file(self, name: str) -> Bytes | None:
        path = os.path.join(self.name, name)
        return LocalFile(path) if os.path.isfile(path) else None

    def names(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self.name) if entry.is_file())


class StoreFolder:
    def __init__(self, store: Store) -> None:
        self.name = store.url
        self._store = store

    def file(self, name: str) -> Bytes | None:
        blob = self._store.stat(name)
        return StoredFile(self._store, name, size_bytes=blob.size_bytes) if blob is not None else None

    def names(self) -> list[str]:
        return [blob.key for blob in self._store.list() if "/" not in blob.key]


def named_file(folder: Folder, name: object) -> Bytes:
    """A file that another one of the folder names. It never lies elsewhere."""
    path = PurePosixPath(name) if isinstance(name, str) and name and "\0" not in name else None
    if path is None or path.is_absolute() or ".." in path.parts:
        raise Damaged(path=folder.name, reason=f"it lists {name!r} as one of its files")
    found = folder.file(str(path))
    if found is None:
        raise Damaged(path=folder.name, reason=f"'{name}' is missing")
    return found


# --- .pt ------------------------------------------------------------------------------------------------------


def open_pt(file: Bytes, *, memory: Memory, trusted_source: bool = False, verified: bool = False) -> Any:
    """The state in a `.pt` file. Its checksums are compared first, unless the bytes are `verified` already."""
    looked_at = _in_memory_if_small(file)
    stream = io.BufferedReader(
        RangeFile(partial(read_bytes, looked_at), looked_at.size_bytes), buffer_size=file.read_ahead_bytes
    )
    if bytes(read_bytes(looked_at, 0, min(4, file.size_bytes))) != b"PK\3\4":
        return _open_old(file, memory, trusted_source)
    if not verified:
        check_records(stream, path=file.name)
    fd = os.memfd_create("strata-outline", os.MFD_CLOEXEC)
    try:
        records = _copy_outline(looked_at, stream, fd)
        state = _load_mapped(fd, file.name, trusted_source)
        base = _mapped_at(fd) if len(records) > 1 else None
    finally:
        os.close(fd)
    names: dict[int, str] = {}
    for path, leaf in leaves(state, leaf=torch.Tensor):
        names.setdefault(id(leaf), dotted(path))

    def made(_: int, tensor: torch.Tensor) -> LazyTensor:
        name = names[id(tensor)]
        check_plain(name, tensor)
        storage = tensor.untyped_storage()
        start_bytes = 0  # Without bytes it is nowhere.
        if storage.nbytes() and tensor.numel():
            start_bytes = records[0] if base is None else storage.data_ptr() - base
        region = Region(
            file=file,
            start_bytes=start_bytes + int(tensor.storage_offset()) * tensor.itemsize,
            stride=tuple(tensor.stride()),
        )
        return LazyTensor(
            name=name,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            chunks=(Chunk(offsets=(0,) * tensor.dim(), sizes=tuple(tensor.shape), region=region),),
            memory=memory,
            record=_record(file, tensor, start_bytes),
            requires_grad=tensor.requires_grad,
            is_parameter=isinstance(tensor, torch.nn.Parameter),
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
        )

    return rebuild(state, made)


def _record(file: Bytes, tensor: torch.Tensor, start_bytes: int) -> Record | None:
    if tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return None
    return Record(file=file, start_bytes=start_bytes, size_bytes=tensor.untyped_storage().nbytes())


def open_image(file: Bytes, manifest: Manifest, *, memory: Memory, trusted_source: bool = False) -> Any:
    """The state of an image, from its verified bytes. What had been an array is a tensor."""
    entries = manifest.tensors
    head = read_bytes(file, 0, head_bytes(entries, file.size_bytes), tensor="its structure")
    try:
        outline = read_outline(memoryview(head))
    except Exception:  # A pickle with more words than Strata's own; torch knows them.
        return open_pt(file, memory=memory, trusted_source=trusted_source, verified=True)

    def made(number: int, recipe: TensorRecipe) -> LazyTensor:
        entry = entries[number]
        check_recipe(entry, recipe)
        start_bytes = entry.offset_bytes - recipe.offset * recipe.dtype.itemsize
        region = Region(file=file, start_bytes=entry.offset_bytes, stride=recipe.stride)
        return LazyTensor(
            name=entry.name,
            dtype=recipe.dtype,
            shape=recipe.shape,
            chunks=(Chunk(offsets=(0,) * len(recipe.shape), sizes=recipe.shape, region=region),),
            memory=memory,
            record=Record(file=file, start_bytes=start_bytes, size_bytes=recipe.record_bytes)
            if math.prod(recipe.shape)
            else None,
            requires_grad=recipe.requires_grad,
            is_parameter=recipe.is_parameter,
        )

    try:
        return put_in_place(outline, made)
    except (ValueError, TypeError, LookupError) as error:
        raise Damaged(path=file.name, reason="its structure does not fit its manifest") from error


def _in_memory_if_small(file: Bytes) -> Bytes:
    """A DCP folder may have a hundred thousand small ones, which are looked at in many places."""
    if not 0 < file.size_bytes <= _SMALL_BYTES:
        return file
    return InMemory(file.name, torch.frombuffer(read_bytes(file, 0, file.size_bytes), dtype=torch.uint8))


def _copy_outline(file: Bytes, stream: IO[bytes], fd: int) -> list[int]:
    """Everything of a zip but the tensors' bytes, at its place. Returns where those are."""

    def copy(start_bytes: int, size_bytes: int) -> bytearray:
        raw = read_bytes(file, start_bytes, size_bytes, tensor="its structure")
        os.pwrite(fd, raw, start_bytes)
        return raw

    records = []
    os.ftruncate(fd, file.size_bytes)
    try:
        with zipfile.ZipFile(stream) as archive:
            for info in sorted(archive.infolist(), key=lambda each: each.header_offset):
                header = read_bytes(file, info.header_offset, _LOCAL_HEADER.size, tensor="its structure")
                _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
                header_bytes = size_bytes = _LOCAL_HEADER.size + name_bytes + extra_bytes
                if not _DATA.fullmatch(info.filename):
                    size_bytes += info.compress_size
                elif info.compress_type != zipfile.ZIP_STORED:
                    raise LoadFailed(
                        f"{file.name}: '{info.filename}' is compressed, which torch.save never does."
                    )
                else:
                    records.append(info.header_offset + header_bytes)
                record = copy(info.header_offset, size_bytes)
                if info.filename.endswith("/byteorder") and record[header_bytes:] != b"little":
                    raise LoadFailed(f"{file.name} was written on a machine of another byte order.")
            directory = archive.start_dir
        copy(directory, file.size_bytes - directory)
    except (
        zipfile.BadZipFile,
        EOFError,
        NotImplementedError,
        ValueError,
        RuntimeError,
        struct.error,
    ) as error:
        raise Damaged(path=file.name, reason=f"the file is not intact ({error})") from error
    return records


def _load_mapped(fd: int, name: str, trusted_source: bool) -> Any:
    # Shared, because a private mapping of a file larger than memory is refused; nothing writes to it.
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return open_in_memory(f"/proc/self/fd/{fd}", trusted_source=trusted_source, name=name)


def _mapped_at(fd: int) -> int:
    """Where in memory torch has mapped a file; 0 where there was nothing to map."""
    facts = os.fstat(fd)
    device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, _, offset, at, inode, *_ = line.split(maxsplit=5)
            if (at, inode) == (device, str(facts.st_ino)) and not int(offset, 16):
                return int(addresses.partition("-")[0], 16)
    return 0


def _open_old(file: Bytes, memory: Memory, trusted_source: bool) -> Any:
    """Files of torch before 1.6, which cannot be read in parts."""
    fd = os.memfd_create("strata-payload", os.MFD_CLOEXEC)
    try:
        for piece in file.pieces(0, file.size_bytes, tensor=""):
            os.write(fd, piece)
        state = open_in_memory(f"/proc/self/fd/{fd}", trusted_source=trusted_source, name=file.name)
    finally:
        os.close(fd)
    return held(state, name="", memory=memory)


# --- safetensors and Hugging Face -----------------------------------------------------------------------------


def is_safetensors(file: Bytes) -> bool:
    """By its first bytes: the length of a header, and its first brace."""
    if file.size_bytes < 10:
        return False
    length, brace = struct.unpack("<Qc", read_bytes(file, 0, 9))
    return bool(2 <= length <= _MOST_HEADER_BYTES and brace == b"{")


def open_safetensors(file: Bytes, *, memory: Memory) -> dict[str, Any]:
    """The tensors of a file by name; nested, with the values beside them, where an export of ours has written how."""
    values, metadata = read_safetensors(file, memory=memory)
    paths: dict[str, tuple[str | int, ...]] = {}
    try:
        values |= json.loads(metadata.get(VALUES, "{}"))
        for name, keys in json.loads(metadata.get(PATHS, "{}")).items():
            paths[name] = tuple(_path_key(key, most=len(values)) for key in keys)
        if any(not keys for keys in paths.values()):
            raise ValueError("an empty path")
        return nest(values, paths)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(path=file.name, reason=f"its metadata is not readable ({error})") from error


def _path_key(key: object, *, most: int) -> str | int:
    if type(key) is str or (type(key) is int and 0 <= key < most):
        return key
    raise ValueError(f"{key!r} in a path")


def read_safetensors(file: Bytes, *, memory: Memory) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors by name, and the metadata."""
    try:
        (length,) = struct.unpack("<Q", read_bytes(file, 0, 8))
        if not 2 <= length <= _MOST_HEADER_BYTES:
            raise ValueError("its header has an impossible length")
        header = json.loads(bytes(read_bytes(file, 8, length)))
        metadata = header.pop("__metadata__", None) or {}
        tensors: dict[str, Any] = {}
        end_bytes = 0
        for name, facts in header.items():
            dtype = SAFETENSORS_DTYPES.get(facts["dtype"])
            if dtype is None:
                raise LoadFailed(f"{file.name}: '{name}' is of {facts['dtype']!r}, which is not supported.")
            start, end = facts["data_offsets"]
            counts = [start, end, *facts["shape"]]
            if (
                any(type(count) is not int or count < 0 for count in counts)
                or _elements(facts["shape"]) >= 2**60
            ):
                raise ValueError(f"'{name}' has an impossible offset")
            if math.prod(facts["shape"]) * dtype.itemsize != end - start:
                raise ValueError(f"'{name}' has {end - start} bytes, which does not match its shape")
            tensors[name] = in_file(name, file, 8 + length + start, dtype, facts["shape"], memory)
            end_bytes = max(end_bytes, end)
        if file.size_bytes != 8 + length + end_bytes:
            raise ValueError(f"it has {file.size_bytes} bytes, its header says {8 + length + end_bytes}")
        if any(type(text) is not str for pair in metadata.items() for text in pair):
            raise ValueError("its metadata is not text")
        return tensors, metadata
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(path=file.name, reason=f"it is not an intact safetensors file ({error})") from error


def _elements(shape: list[int]) -> int:
    """Of a tensor with these dimensions, where those of size 0 count as 1: what torch computes strides of."""
    return math.prod(max(size, 1) for size in shape)


def open_hf(folder: Folder, *, memory: Memory) -> dict[str, Any] | None:
    """The weights of a Hugging Face folder by name; None for a folder that is none."""
    for name in HF_INDEXES:
        index = folder.file(name)
        if index is not None:
            return _open_indexed(folder, index, memory)
    for name in HF_FILES:
        file = folder.file(name)
        if file is not None:
            return _open_weights(file, memory)
    only = [name for name in folder.names() if name.endswith(".safetensors")]
    return _open_weights(named_file(folder, only[0]), memory) if len(only) == 1 else None


def _open_indexed(folder: Folder, index: Bytes, memory: Memory) -> dict[str, Any]:
    try:
        weights = json.loads(bytes(read_bytes(index, 0, index.size_bytes)))["weight_map"]
        files = {name: named_file(folder, name) for name in sorted(set(weights.values()))}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(path=index.name, reason="the index of weights is not intact") from error
    opened = {name: _open_weights(file, memory) for name, file in files.items()}
    missing = [name for name, at in weights.items() if name not in opened[at]]
    if missing:
        raise Damaged(
            path=folder.name,
            reason=f"'{weights[missing[0]]}' does not hold the tensors its index lists",
            tensors=missing,
        )
    return {name: opened[at][name] for name, at in weights.items()}


def _open_weights(file: Bytes, memory: Memory) -> dict[str, Any]:
    if not file.name.endswith(".safetensors"):
        state = open_pt(file, memory=memory)
        if not isinstance(state, Mapping):
            raise LoadFailed(f"'{file.name}' holds no weights by name.")
        return dict(state)
    return open_safetensors(file, memory=memory)


# --- DCP ------------------------------------------------------------------------------------------------------


def open_dcp(folder: Folder, *, memory: Memory) -> dict[str, Any]:
    """The state of a folder that `dcp.save` has written with PyTorch's own `FileSystemWriter`."""
    file = named_file(folder, DCP_METADATA)
    try:
        metadata = _Metadata(io.BytesIO(read_bytes(file, 0, file.size_bytes))).load()
        if type(metadata) is not Metadata:
            raise ValueError("it describes no checkpoint")
        values = dict(_dcp_values(folder, metadata, memory))
        return nest(values, _dcp_paths(metadata, most=len(values)))
    except (Damaged, LoadFailed, UnsupportedState):
        raise
    except Exception as error:  # A pickle that was made to do harm fails in any way it likes.
        raise Damaged(path=file.name, reason=f"the metadata is not readable ({error})") from error


def _dcp_paths(metadata: Metadata, *, most: int) -> dict[str, tuple[str | int, ...]]:
    planner_data = metadata.planner_data
    if not isinstance(planner_data, Mapping):  # A planner that did not flatten.
        return {}
    paths = {
        str(name): tuple(_path_key(key, most=most) for key in keys) for name, keys in planner_data.items()
    }
    if any(not keys for keys in paths.values()):
        raise ValueError("an empty path")
    return paths


def _dcp_values(folder: Folder, metadata: Metadata, memory: Memory) -> Iterator[tuple[str, Any]]:
    files: dict[str, Bytes] = {}

    def stretch(index: MetadataIndex) -> Stretch:
        info = metadata.storage_data[index]
        if getattr(info, "transform_descriptors", None):
            raise LoadFailed(
                f"{folder.name}: '{index.fqn}' was saved through an extension, such as compression."
            )
        if info.relative_path not in files:
            files[info.relative_path] = named_file(folder, info.relative_path)
        found = Stretch(file=files[info.relative_path], start_bytes=info.offset, size_bytes=info.length)
        if type(info.offset) is not int or type(info.length) is not int or info.offset < 0:
            raise ValueError(f"'{index.fqn}' has an impossible offset")
        if info.offset + info.length > found.file.size_bytes:
            raise Damaged(path=found.name, reason="the file is cut short", tensors=(index.fqn,))
        return found

    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            at = stretch(MetadataIndex(name))
            value = load_object(bytes(read_bytes(at, 0, at.size_bytes, tensor=name)), name=name)
            yield name, held(value, name=name, memory=memory)
            continue
        dtype = entry.properties.dtype
        chunks = []
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            stored = _dcp_tensor(name, stretch(MetadataIndex(name, chunk.offsets)), memory)
            fits = len(offsets) == len(sizes) == len(entry.size) and all(
                a >= 0 and n >= 0 and a + n <= whole
                for a, n, whole in zip(offsets, sizes, entry.size, strict=True)
            )
            if not fits or stored.shape != sizes or stored.dtype is not dtype:
                raise ValueError(f"a chunk of '{name}' does not fit its tensor")
            chunks.append(Chunk(offsets=offsets, sizes=sizes, region=stored.chunks[0].region))
        yield (
            name,
            LazyTensor(
                name=name,
                dtype=dtype,
                shape=tuple(entry.size),
                chunks=tuple(chunks),
                memory=memory,
                requires_grad=bool(entry.properties.requires_grad),
            ),
        )


def _dcp_tensor(name: str, file: Stretch, memory: Memory) -> LazyTensor:
    stored = open_pt(file, memory=memory)
    if not isinstance(stored, LazyTensor) or stored.is_conj or stored.is_neg:
        raise ValueError(f"'{name}' is not a plain tensor")
    return stored


class _Metadata(pickle.Unpickler):
    """Knows the types that DCP's metadata is made of, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        known = _METADATA_TYPES.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of such a file")
        return known


def _member(kind: Any, name: Any) -> MemoryFormat:
    """In the place of `getattr`, by which some versions of Python pickle the members of enumerations."""
    if kind is not MemoryFormat or type(name) is not str or name not in MemoryFormat.__members__:
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which is not part of such a file")
    return MemoryFormat[name]


_METADATA_TYPES: dict[tuple[str, str], Any] = {
    **{
        (dcp_metadata.__name__, name): getattr(dcp_metadata, name)
        for name in (
            "Metadata", "MetadataIndex", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata",
            "ChunkStorageMetadata", "StorageMeta",
        )
    },
    **PRIVATE_GLOBALS,
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    **{(module, name): PurePosixPath for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")},
    **{("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
}  # fmt: skip
