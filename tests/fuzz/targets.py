"""What is fuzzed. Each target makes inputs that are nearly right, and reads them as the product does.

The structure of an input is known here, digests and checksums are made to fit: an attacker does so, and what lies behind the
first check is what is worth testing.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import shutil
import socket
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from strata.errors import StrataError
from tests.fuzz.harness import SCRATCH, Target
from tests.fuzz.mutation import NUMBERS, TEXTS, mutated, mutated_json

EXAMPLES = Path(__file__).parents[2] / "examples"


def make_target(name: str) -> Target:
    makers: dict[str, Callable[[], Target]] = {
        "wire": Wire,
        "events": Events,
        "manifest": ManifestFile,
        "index": IndexFile,
        "settings": Settings,
        "trainer_config": TrainerConfig,
        "image": Image,
        "import": Import,
        "journal": JournalFiles,
        "http": Http,
    }
    return makers[name]()


class Stateless:
    errors: tuple[type[BaseException], ...] = (StrataError,)
    renewed_every = 0

    def renew(self) -> None:
        pass


def scratch() -> Path:
    """A folder that whoever started this process removes."""
    return Path(tempfile.mkdtemp(dir=os.environ.get(SCRATCH)))


# --- what workers send --------------------------------------------------------------------------------------


class Wire:
    """Bytes of a gRPC message, through the method's reader and `wire` to the core's decision, and into the journal's form."""

    errors: tuple[type[BaseException], ...] = (StrataError,)
    renewed_every = 500

    def __init__(self) -> None:
        from google.protobuf.message_factory import GetMessageClass

        from strata.core import messages as m
        from strata.rpc import methods, wire

        def dataset(message: Any) -> m.RegisterDataset:
            total = message.total_samples or 100
            return m.RegisterDataset(spec=wire.dataset_spec(message, (), total))

        def plan(message: Any) -> m.PlanEpoch:
            return m.PlanEpoch(
                worker_id=m.WorkerId(message.worker_id),
                incarnation=message.incarnation,
                generation=message.generation,
                dataset_id=m.DatasetId(message.dataset_id),
                epoch=int(message.epoch),
            )

        def swap(message: Any) -> m.SwapValue:
            return m.SwapValue(
                key=message.key,
                body=message.value,
                expected_version=message.expected_version,
                soft=message.soft,
            )

        def progress(message: Any) -> m.ProgressReported:
            return wire.progress(message.progress, m.WorkerId("w0"), 1)

        convert: dict[str, Callable[[Any], Any]] = {
            "RegisterWorker": wire.register_worker,
            "Heartbeat": wire.heartbeat,
            "DeregisterWorker": wire.deregister_worker,
            "RegisterDataset": dataset,
            "GetDataShard": plan,
            "WaitBarrier": wire.arrive,
            "NotifyCheckpoint": wire.notify_checkpoint,
            "ReconcileCheckpoints": wire.reconcile_checkpoints,
            "ReportRecovery": wire.report_recovery,
            "ReportFailure": wire.report_failure,
            "SwapValue": swap,
            "Session": progress,
        }
        self._methods = [
            (GetMessageClass(method.input_type), convert[method.name])
            for method in methods.SERVICE.methods
            if method.name in convert
        ]
        self._read = [methods._reader(kind) for kind, _ in self._methods]
        self._malformed = methods.Malformed
        self._observed = (m.Heartbeat, m.ProgressReported)
        self._seeds = [self._sample(kind) for kind, _ in self._methods]
        self._at_s = 0.0

    def renew(self) -> None:
        from strata.core.messages import RegisterDataset
        from tests.core.builders import Fleet, dataset_spec

        self._fleet = Fleet()
        self._fleet.joins("w0", "w1", "w2")
        self._fleet.do(RegisterDataset(spec=dataset_spec("d")))

    @staticmethod
    def _sample(kind: Any) -> list[Any]:
        """Messages as real workers send them: names that exist, present numbers."""
        names = {
            "worker_id": "w0",
            "dataset_id": "d",
            "checkpoint_id": "c",
            "barrier_id": "b",
            "job_id": "default",
            "path": "/p",
            "format": "jsonl",
            "hostname": "h",
            "key": "k",
            "tier": "memory",
        }
        samples = []
        for many in (False, True):
            message = kind()
            for field in message.DESCRIPTOR.fields:
                if field.name in names:
                    setattr(message, field.name, names[field.name])
                elif many and not field.is_repeated and field.message_type is None and field.type != 9:
                    setattr(message, field.name, b"x" if field.type == 12 else 1)
            samples.append(message)
        return samples

    def make(self, chance: Random) -> bytes:
        number = chance.randrange(len(self._methods))
        message = type(self._seeds[number][0])()
        message.CopyFrom(chance.choice(self._seeds[number]))
        for _ in range(chance.choice((0, 1, 1, 2, 4))):
            self._set_something(message, chance)
        data: bytes = message.SerializeToString()
        if chance.random() < 0.4:
            data = mutated(data, chance)
        return bytes([number]) + data

    def _set_something(self, message: Any, chance: Random) -> None:
        if not message.DESCRIPTOR.fields:
            message.SetInParent()  # That it is there is all that it says.
            return
        field = chance.choice(message.DESCRIPTOR.fields)
        try:
            if field.message_type is not None:
                if field.message_type.GetOptions().map_entry:
                    entries = getattr(message, field.name)
                    for n in range(chance.choice((1, 2, 70))):
                        key = f"{chance.choice(TEXTS)[:50]}{n}"
                        entries[key] = self._scalar(field.message_type.fields_by_name["value"], chance)
                elif field.is_repeated:
                    for _ in range(chance.choice((1, 3, 200))):
                        self._set_something(getattr(message, field.name).add(), chance)
                else:
                    self._set_something(getattr(message, field.name), chance)
            elif field.is_repeated:
                values = [self._scalar(field, chance) for _ in range(chance.choice((1, 3, 100)))]
                getattr(message, field.name).extend(values)
            else:
                setattr(message, field.name, self._scalar(field, chance))
        except (ValueError, TypeError, UnicodeError):
            pass  # What protobuf itself does not write cannot arrive either.

    @staticmethod
    def _scalar(field: Any, chance: Random) -> Any:
        match field.type:
            case 9:
                return chance.choice((*TEXTS, "w0", "w1", "d", "c", "default", chance.randbytes(8).hex()))
            case 12:
                return chance.randbytes(chance.choice((0, 1, 16, 40, 1000)))
            case 1 | 2:
                return chance.choice((0.0, -1.0, 1e308, float("nan"), float("inf"), chance.random() * 1000))
            case 8:
                return chance.random() < 0.5
            case 14:
                return chance.randrange(8)
        number = chance.choice((*NUMBERS, 1, 2, 3, chance.randrange(1000)))
        return chance.choice((number, number, -number))

    def run(self, data: bytes) -> None:
        from strata.coordinator.journal import codec
        from strata.core.messages import SOFT_EVENTS, Tick
        from tests.core.builders import instant

        if not data:
            return
        number = data[0] % len(self._methods)
        message = self._read[number](data[1:])
        if isinstance(message, self._malformed):
            return
        command = self._methods[number][1](message)
        self._at_s += 0.01
        now, cluster = instant(1_000 + self._at_s), self._fleet.cluster
        if isinstance(command, self._observed):
            cluster.observe(command, now)
            return
        decision = cluster.handle(command, now)
        for event in decision.events:
            if not isinstance(event, SOFT_EVENTS):
                kind = codec.kind_of(event)
                again = codec.decode(kind, codec.encode(event))
                assert codec.encode(again) == codec.encode(event), "what is journaled is not what happened"
        if len(data) % 16 == 0:
            cluster.handle(Tick(), now)
            if len(data) % 64 == 0:
                self._show(cluster)

    @staticmethod
    def _show(cluster: Any) -> None:
        """What the state looks like to readers must be possible to write down."""
        import msgspec

        from strata.core import views

        msgspec.json.encode(views.workers(cluster))
        msgspec.json.encode([views.checkpoint(record) for record in cluster.checkpoints.shown()[:20]])
        msgspec.json.encode([views.dataset(cluster, spec) for spec in cluster.datasets.specs.values()])


# --- what a restart reads -----------------------------------------------------------------------------------


def _history() -> list[Any]:
    """The events of a short life: most kinds, and the snapshot that would follow."""
    from strata.core import messages as m
    from tests.core.builders import Fleet, arrival, dataset_spec, instant, notice, task_spec

    fleet = Fleet()
    fleet.joins("w0", "w1")
    commands: list[m.Command] = [
        m.RegisterDataset(spec=dataset_spec("d")),
        m.CreateTask(spec=task_spec("t")),
        m.BeginAttempt(task_id=m.TaskId("t"), reason="begins"),
        notice("w0", "c1", 1),
        notice("w0", "c2", 2),
        m.SwapValue(key="k", body=b"body", expected_version=0),
        m.SwapValue(key="soft", body=b"body", expected_version=0, soft=True),
        arrival("w0"),
        arrival("w1"),
        m.EndAttempt(task_id=m.TaskId("t"), attempt=1, cause=None),
        m.Rebalance(),
        m.DeregisterWorker(worker_id=m.WorkerId("w1"), incarnation=0, reason="leaves"),
    ]
    events: list[Any] = list(fleet.cluster.compact())
    for number, command in enumerate(commands):
        decision = fleet.cluster.handle(command, instant(2_000 + number))
        events += [event for event in decision.events if not isinstance(event, m.SOFT_EVENTS)]
    return events


class Events(Stateless):
    """Records of a journal whose content is wrong, replayed as a restart replays them."""

    def __init__(self) -> None:
        import msgspec

        from strata.coordinator.journal import codec

        self._rows = [(codec.kind_of(event), codec.encode(event)) for event in _history()]
        self._kinds = sorted(codec.KINDS)
        self._unpack, self._pack = msgspec.msgpack.decode, msgspec.msgpack.encode

    def make(self, chance: Random) -> bytes:
        rows = list(self._rows)
        at = chance.randrange(len(rows))
        kind, body = rows[at]
        fate = chance.random()
        if fate < 0.5:
            document = mutated_json(self._unpack(body), chance)
            try:
                body = self._pack(document)
            except (TypeError, ValueError, OverflowError, RecursionError, UnicodeError):
                body = mutated(body, chance)
        elif fate < 0.8:
            body = mutated(body, chance)
        elif fate < 0.9:
            kind = chance.choice([*self._kinds, "Nothing", ""])
        else:
            rows.insert(at, chance.choice(rows))
            del rows[chance.randrange(len(rows))]
        if fate < 0.9:
            rows[at] = (kind, body)
        return self._pack(rows)

    def run(self, data: bytes) -> None:
        from strata.coordinator.engine import Engine, SystemClock
        from strata.coordinator.journal import sqlite
        from strata.core.cluster import Cluster

        rows = self._unpack(data)

        class InMemory:
            space: Any = None

            def __str__(self) -> str:
                return "in memory"

            def load(self) -> Iterator[Any]:
                for kind, body in rows:
                    yield sqlite._decode(Path("in memory"), kind, body)

        engine = Engine(Cluster(), InMemory(), SystemClock())  # type: ignore[arg-type]
        try:
            engine.replay()
            engine.cluster.compact()
        finally:
            engine._disk.shutdown()


class JournalFiles(Stateless):
    """The files of a journal, cut, flipped or followed by garbage: above all at the end of the log, as a crash leaves it."""

    def __init__(self) -> None:
        from strata.coordinator.journal.sqlite import SqliteJournal

        self._folder = scratch()
        journal = SqliteJournal(self._folder, reserve_bytes=4096)
        events = _history()
        journal.append(events[:3])
        journal.snapshot(events[:3])
        for event in events[3:]:
            journal.append([event])
        self._files = {
            suffix: (self._folder / f"journal.sqlite{suffix}").read_bytes() for suffix in ("", "-wal")
        }
        self._events = events
        journal.close()
        self._closed = {"": (self._folder / "journal.sqlite").read_bytes(), "-wal": b""}

    def make(self, chance: Random) -> bytes:
        which = chance.choice(("-wal", "-wal", ""))
        files = dict(self._files if which else self._closed)
        data = files[which]
        fate = chance.random()
        if fate < 0.3:
            data = data[: chance.randrange(len(data))]
        elif fate < 0.5:
            data += chance.choice((chance.randbytes(5000), b"\0" * 4096, data[-4120:]))
        elif fate < 0.7:
            tail = max(0, len(data) - 4120)
            data = data[:tail] + mutated(data[tail:], chance)
        else:
            data = mutated(data, chance)
        files[which] = data
        return len(files[""]).to_bytes(4, "big") + files[""] + files["-wal"]

    def run(self, data: bytes) -> None:
        from strata.coordinator.engine import Engine, SystemClock
        from strata.coordinator.journal.sqlite import SqliteJournal, read_story
        from strata.core.cluster import Cluster

        size = int.from_bytes(data[:4], "big")
        main, wal = data[4 : 4 + size], data[4 + size :]
        for file in self._folder.glob("journal.sqlite*"):
            file.unlink()
        (self._folder / "journal.sqlite").write_bytes(main)
        (self._folder / "journal.sqlite-wal").write_bytes(wal)
        journal = SqliteJournal(self._folder, reserve_bytes=4096)
        engine = Engine(Cluster(), journal, SystemClock())
        try:
            engine.replay()
            if main == self._files[""]:
                found = list(journal.load())
                assert found == self._events[: len(found)], "what is left of a log is not how it began"
            journal.append(self._events[:1])
            for _ in read_story(self._folder):
                pass
        finally:
            engine.close()


# --- what lies in stores ------------------------------------------------------------------------------------


class ManifestFile(Stateless):
    """A manifest, its digest made to fit as whoever writes to a store can."""

    def __init__(self) -> None:
        from strata.checkpoint.catalog import manifest
        from strata.checkpoint.copying.digest import digest_of

        self._module = manifest
        data = memoryview(b"x" * 5000)
        entry = manifest.TensorEntry("layer.weight", "float32", (10, 20), 64, 800)
        part = manifest.Part(key="step-1.pt", size_bytes=5000, digest=digest_of(data))
        one = manifest.Manifest(
            checkpoint_id=manifest.CheckpointId("c1"),
            step=1,
            epoch=0,
            created_at=1.5,
            format=manifest.IMAGE,
            parts=(part,),
            tensors=(entry, entry._replace(name="b", kind="numpy")),
            metadata={"a": [1, {"b": None}]},
            data={"version": 1},
            author="a",
            run="r",
            parent=manifest.CheckpointId("c0"),
        )
        self._seeds = [one.encode()]
        self._body = json.loads(self._seeds[0])["body"]

    def make(self, chance: Random) -> bytes:
        fate = chance.random()
        if fate < 0.1:
            return mutated(self._seeds[0], chance)
        if fate < 0.3:
            inner = self._seeds[0][len(self._module._SEAL_HEAD) : -self._module._SEAL_TAIL_BYTES]
            return self._module._seal(mutated(inner, chance))
        try:
            text = json.dumps(mutated_json(self._body, chance), ensure_ascii=chance.random() < 0.5)
            return self._module._seal(text.encode(errors="surrogatepass"))
        except (RecursionError, ValueError):
            return self._module._seal(b"[" * 100_000)

    def run(self, data: bytes) -> None:
        found = self._module.decode(data, path="somewhere", keys=None)
        _ = found.order, found.size_bytes, found.digest, found.tensors_in([0, 1])
        assert self._module.decode(found.encode(), path="again", keys=None) == found or found.created_at == 0


class IndexFile(Stateless):
    """A token index with counts and places of somebody else's choosing."""

    def __init__(self) -> None:
        import struct

        from strata.data.tokens import format as form

        self._form = form
        self._path = scratch() / "index"
        files = (
            form.IndexedFile(
                name="a.jsonl",
                kind="jsonl",
                size_bytes=100,
                digest="d",
                first_record=0,
                first_token=0,
                bad_records=0,
            ),
        )
        meta = form.IndexMeta(
            files=files,
            tokenizer="t",
            tokenizer_named=True,
            tokenizer_probe="p",
            tokenizer_fingerprint=None,
            vocab_size=100,
            text_key="text",
            eos_id=0,
            tokens_digest="x",
        ).to_bytes()
        self._header = form.IndexHeader(
            num_files=1,
            num_entries=3,
            num_records=4,
            total_tokens=30,
            entry_interval=10,
            token_bytes=2,
            meta_bytes=len(meta),
            identity=form.identity_of(meta),
        )
        self._sections = {
            form.TOKENS_AT: b"".join(struct.pack("<H", n) for n in range(30)),
            self._header.entries_at: b"".join(
                form.IndexEntry(file_index=0, byte_offset=n, cumulative_tokens=n * 10, record=n).to_bytes()
                for n in range(3)
            ),
            self._header.starts_at: struct.pack("<4Q", 0, 8, 16, 24),
            self._header.places_at: struct.pack("<4Q", 0, 25, 50, 75),
        }
        self._meta = meta

    def make(self, chance: Random) -> bytes:
        from dataclasses import replace

        header, meta = self._header, self._meta
        fate = chance.random()
        if fate < 0.4:
            document = mutated_json(json.loads(meta), chance)
            try:
                meta = json.dumps(document).encode()
            except (RecursionError, ValueError):
                meta = b"[" * 50_000
            header = replace(header, meta_bytes=len(meta), identity=self._form.identity_of(meta))
        elif fate < 0.7:
            name = chance.choice(
                ("num_files", "num_entries", "num_records", "total_tokens", "entry_interval", "token_bytes")
            )
            small = name in ("num_files", "entry_interval", "token_bytes")
            value = chance.choice((*NUMBERS, 3, 5)) % (2**32 if small else 2**64)
            changed: dict[str, Any] = {name: value}
            header = replace(header, **changed)
        out = bytearray(self._header.meta_at)
        out[: header.SIZE] = header.to_bytes()
        for at, section in self._sections.items():
            section = mutated(section, chance)[: len(section)] if fate > 0.8 else section
            out[at : at + len(section)] = section
        at = self._header.meta_at
        if header.file_bytes < 200_000:  # Of the size that fits, where it can be written.
            out = (out + bytes(header.meta_at))[: header.meta_at]
            at = header.meta_at
        out[at:] = meta
        return mutated(bytes(out), chance) if 0.7 <= fate < 0.8 else bytes(out)

    def run(self, data: bytes) -> None:
        from strata.data.tokens.index import TokenIndex

        self._path.write_bytes(data)
        with TokenIndex(self._path) as index:
            _ = int(index.tokens[:1000].sum()), index.identity, index.meta.bad_records
            for number in {0, 1, index.total_tokens // 2, index.total_tokens - 1}:
                if 0 <= number < index.total_tokens:
                    index.find_position(number)


class Image(Stateless):
    """`.pt` files of strangers: archives, bare pickles, and the engine's own images without a manifest."""

    def __init__(self) -> None:
        from collections import OrderedDict

        import torch

        from strata.checkpoint.image import nested, plain, reading, unpickling
        from tests.checkpoint.malicious import payloads, torch_file

        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # Torch's, about pickles of other protocols.
        self._canary = scratch() / "canary"
        self._plain, self._reading, self._unpickling = plain, reading, unpickling
        self._nested = nested
        weights = torch.arange(12, dtype=torch.float32)
        state = {
            "model": OrderedDict(weight=weights.view(3, 4), bias=weights[:3], half=torch.ones(4).half()),
            "step": 3,
            "nested": [1.5, None, ("a", True)],
        }
        self._seeds = []
        for options in ({}, {"_use_new_zipfile_serialization": False}):
            buffer = io.BytesIO()
            torch.save(state, buffer, **options)
            self._seeds.append(buffer.getvalue())
        self._seeds += [torch_file(bad) for bad in payloads(self._canary).values()]
        self._records = self._unzipped(self._seeds[0])

    @staticmethod
    def _unzipped(data: bytes) -> dict[str, bytes]:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    def make(self, chance: Random) -> bytes:
        fate = chance.random()
        if fate < 0.45:
            data = mutated(chance.choice(self._seeds[:2] * 4 + self._seeds[2:]), chance, self._seeds)
        else:  # An archive that is intact, around a record that is not.
            records = dict(self._records)
            name = chance.choice([n for n in records if n.endswith("data.pkl")] * 3 + list(records))
            records[name] = mutated(records[name], chance)
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as archive:
                for each, content in records.items():
                    archive.writestr(each, content)
            data = buffer.getvalue()
        return data

    def run(self, data: bytes) -> None:
        import torch

        # It leaves all that it does not know to torch: it must only not hang, run or crash.
        with suppress(Exception):
            self._unpickling.read_outline(data)
        held = self._reading.Held(len(data))
        try:
            with held.view as view:
                view[:] = data
            self._plain.check_records(held.path, path="somewhere")
            self._plain._is_image(held.path)
            state = self._reading.open_image(held.path, name="somewhere")
            for _, tensor in self._nested.leaves(state, leaf=torch.Tensor):
                if isinstance(tensor, torch.Tensor):
                    tensor.detach().reshape(-1)[:1000].clone()  # Its bytes can be read.
        finally:
            held.close()
            assert not self._canary.exists(), "code from the file ran"


class Import(Stateless):
    """What `strata checkpoint import` is given: a case is one file of a model, and its name; the others are right."""

    def __init__(self) -> None:
        import torch
        from safetensors.torch import save
        from torch.distributed import checkpoint as dcp

        from strata.checkpoint.importing import adopt
        from tests.checkpoint.malicious import payloads, torch_file

        torch.set_num_threads(1)
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        self._adopt = adopt
        self._folder = scratch()
        self._canary = self._folder / "canary"
        weights = torch.arange(12, dtype=torch.float32)
        state = {"model": {"weight": weights.view(3, 4).t(), "bias": weights[:3]}, "step": 3}
        archive = io.BytesIO()
        torch.save(state, archive)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(self._folder / "dcp"), no_dist=True)
        index = {"weight_map": dict.fromkeys(("weight", "bias"), "model-1.safetensors")}
        self._files = {
            "model.pt": archive.getvalue(),
            "model.safetensors": save({"weight": weights, "empty": weights[:0]}, metadata={"format": "pt"}),
            "hf/model.safetensors.index.json": json.dumps(index).encode(),
            "hf/model-1.safetensors": save({"weight": weights.half(), "bias": weights.bfloat16()}),
            **{f"dcp/{path.name}": path.read_bytes() for path in (self._folder / "dcp").iterdir()},
        }
        self._hostile = [torch_file(bad) for bad in payloads(self._canary).values()]
        self._hostile += list(payloads(self._canary).values())
        for name, data in self._files.items():
            path = self._folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)

    def make(self, chance: Random) -> bytes:
        name = chance.choice(list(self._files))
        data = self._files[name]
        if chance.random() < 0.1:
            data = chance.choice(self._hostile)
        elif name.endswith(".json"):
            data = self._changed(data, chance)
        elif name.endswith(".safetensors") and chance.random() < 0.7:
            length = int.from_bytes(data[:8], "little")
            raw = self._changed(data[8 : 8 + length], chance)
            data = len(raw).to_bytes(8, "little") + raw + data[8 + length :]
        else:
            data = mutated(data, chance, list(self._files.values()))
        return name.encode() + b"\0" + data

    @staticmethod
    def _changed(document: bytes, chance: Random) -> bytes:
        try:
            return json.dumps(mutated_json(json.loads(document), chance)).encode("utf-8", "surrogatepass")
        except RecursionError:  # Too deep to be written this way.
            return b'{"a":' * 100_000

    def run(self, data: bytes) -> None:
        name, _, content = data.partition(b"\0")
        path, run = self._folder / name.decode(), self._folder / "run"
        path.write_bytes(content)
        try:
            self._adopt(str(path.parent if path.parent != self._folder else path), str(run))
        finally:
            path.write_bytes(self._files[name.decode()])
            shutil.rmtree(run, ignore_errors=True)
            assert not self._canary.exists(), "code from the file ran"


# --- what people write --------------------------------------------------------------------------------------


class Settings(Stateless):
    """The coordinator's settings: a TOML file, and variables of the environment."""

    def __init__(self) -> None:
        from strata.config import documented
        from strata.coordinator.settings import CoordinatorSettings, read_settings

        self._read = read_settings
        self._path = scratch() / "strata.toml"
        rows = documented(CoordinatorSettings)
        self._keys = [key for key, *_ in rows]
        self._variables = [variable for _, _, variable, _ in rows if variable]
        self._seed = b"""[coordinator]
host = "127.0.0.1"
grpc_port = 50051
heartbeat_timeout = 30.0
allowed_hosts = ["a.example", "b.example"]
launcher = "local"
[coordinator.tokens]
viewer = "0123456789abcdef-viewer"
"""

    def make(self, chance: Random) -> bytes:
        values = (
            "1",
            "-1",
            "1e400",
            '"x"',
            "[]",
            "[1]",
            "{}",
            "{a = 1}",
            "true",
            "1979-05-27",
            "nan",
            "0x" + "f" * 400,
        )
        lines = self._seed.decode().splitlines()
        for _ in range(chance.choice((0, 1, 3))):
            lines.insert(
                chance.choice((1, 2, len(lines))), f"{chance.choice(self._keys)} = {chance.choice(values)}"
            )
        data = "\n".join(lines).encode()
        if chance.random() < 0.6:
            data = mutated(data, chance)
        variable = chance.choice(self._variables)
        value = chance.choice((*TEXTS, "5", "0.5", "a,b,,c"))
        return f"{variable}={value}".encode(errors="replace") + b"\0\n" + data

    def run(self, data: bytes) -> None:
        given, _, content = data.partition(b"\0\n")
        name, _, value = given.decode(errors="replace").partition("=")
        self._path.write_bytes(content)
        self._read(file=self._path, environ={name: value})


class TrainerConfig(Stateless):
    """The built-in trainer's YAML."""

    def __init__(self) -> None:
        from strata.trainer.config import read_train_config

        self._read = read_train_config
        self._path = scratch() / "config.yaml"
        self._seeds = [path.read_bytes() for path in sorted((EXAMPLES / "configs").glob("*.yaml"))]
        assert self._seeds
        logging.disable(logging.CRITICAL)

    def make(self, chance: Random) -> bytes:
        import yaml

        seed = chance.choice(self._seeds)
        if chance.random() < 0.5:
            return mutated(seed, chance, self._seeds)
        try:
            return str(yaml.safe_dump(mutated_json(yaml.safe_load(seed), chance))).encode(errors="replace")
        except (yaml.YAMLError, RecursionError, ValueError):
            return mutated(seed, chance)

    def run(self, data: bytes) -> None:
        self._path.write_bytes(data)
        self._read(self._path)


# --- what anybody sends -------------------------------------------------------------------------------------


class Http:
    """Raw bytes on a connection of the real application. Every answer is HTTP; none is a 500, and nothing is logged."""

    errors: tuple[type[BaseException], ...] = ()
    renewed_every = 1000
    REQUESTS = (
        b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /api/workers?limit=5 HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n",
        b"GET /api/events HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: 1-2\r\n\r\n",
        b"GET /api/logs?limit=5&level=info&since=1.0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /api/datasets/d/preview?limit=3 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /api/tasks/t/logs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer abc\r\n\r\n",
        b"POST /api/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 58\r\n\r\n"
        b'{"name": "n", "type": "t", "worker_count": 1, "config": {}}',
        b"POST /api/datasets HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"POST /api/tasks/t/stop HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\nContent-Length: 0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: strata_session_1=x\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\nGET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._logged: list[str] = []
        self._folder = scratch()
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: self._logged.append(handler.format(record))  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        self._runtime: Any = None
        self._running: asyncio.Task[None] | None = None

    def renew(self) -> None:
        import uvicorn
        from uvicorn.server import ServerState

        from strata.coordinator.auth.audit_log import AuditLog
        from strata.coordinator.auth.gatekeeper import AccessRules, Gatekeeper
        from strata.coordinator.auth.tokens import TaskTokens, TokenStore
        from strata.coordinator.http.app import create_app
        from strata.coordinator.http.connections import HttpConnection
        from strata.coordinator.journal.sqlite import SqliteJournal
        from strata.coordinator.logs.store import LogStore
        from strata.coordinator.runtime import Runtime
        from strata.core.cluster import Limits

        if self._running is not None:
            self._runtime.engine.stop()
            self._loop.run_until_complete(self._running)
            self._runtime.engine.close()
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        self._runtime = Runtime.create(SqliteJournal(folder, reserve_bytes=4096), Limits(), LogStore())
        gatekeeper = Gatekeeper(
            AccessRules(trust_loopback=True, hosts=frozenset({"localhost"})),
            tokens=TokenStore(folder),
            task_tokens=TaskTokens(folder),
            is_live=lambda task_id: False,
        )
        app: Any = create_app(self._runtime, gatekeeper, AuditLog(folder))
        config = uvicorn.Config(
            app,
            http=HttpConnection.serving(gatekeeper.owners, most_per_client=50),
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            server_header=False,
        )
        config.load()
        state = ServerState()
        self._protocol = lambda: config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]
        self._running = self._loop.create_task(self._runtime.engine.run())

    def make(self, chance: Random) -> bytes:
        data = chance.choice(self.REQUESTS)
        if chance.random() < 0.5:  # A request that is read, with a value that is odd.
            old, new = chance.choice(
                (
                    (b"/api/", b"/" + mutated(b"api/workers", chance)),
                    (b"limit=5", b"limit=" + chance.choice(TEXTS).encode(errors="replace")),
                    (b" HTTP", b"?" + mutated(b"job_id=a&epoch=3", chance) + b" HTTP"),
                    (b"Host: localhost", b"Host: " + mutated(b"localhost:3000", chance)),
                    (b"\r\n\r\n", b"\r\n" + mutated(b"Range: bytes=0-1", chance) + b"\r\n\r\n"),
                    (b'{"name": "n"', mutated(b'{"name": "n"', chance)),
                    (b"http://localhost", mutated(b"http://localhost:3000", chance)),
                    (b"1-2", mutated(b"1-2", chance)),
                    (b"Bearer abc", mutated(b"Bearer abc", chance)),
                    (b"58", str(chance.choice(NUMBERS)).encode()),
                )
            )
            data = data.replace(old, new, 1)
        else:
            data = mutated(data, chance, self.REQUESTS)
        return data[:100_000]

    def run(self, data: bytes) -> None:
        answer = self._loop.run_until_complete(self._exchange(data))
        logged, self._logged = self._logged, []
        assert not logged, f"logged: {logged[0][:100]} … {logged[0][-1500:]}"
        if answer:
            assert answer.startswith(b"HTTP/1.1 "), f"not HTTP: {answer[:80]!r}"
            assert b"HTTP/1.1 500" not in answer, f"a 500: {answer[:500]!r}"

    async def _exchange(self, data: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        transport, _ = await self._loop.connect_accepted_socket(self._protocol, theirs)
        answer = b""
        try:
            await self._loop.sock_sendall(ours, data)
            ours.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(0.05):
                while piece := await self._loop.sock_recv(ours, 65_536):
                    answer += piece
        except (TimeoutError, OSError):
            pass  # It waits for more, or streams on.
        finally:
            transport.abort()
            ours.close()
            await asyncio.sleep(0)
        return answer
