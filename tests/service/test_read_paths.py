"""What the coordinator reads for whom, and what it reads for nobody."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from strata import CheckpointManager
from strata.coordinator.auth.paths import PathRefused, ReadRules, ReadScope, problems_of_roots
from strata.coordinator.auth.principals import Principal, Role
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb
from tests.service.clients import stub
from tests.support import Coordinator, eventually

TOKENS = {role: f"the-token-of-the-{role}" for role in ("viewer", "worker", "operator", "admin")}


# --- the rule -------------------------------------------------------------------------------------------------


def scope(role: Role, *roots: object, private: tuple[Path, ...] = (), tasks: Path | None = None) -> ReadScope:
    rules = ReadRules(roots=tuple(str(root) for root in roots), private=private, tasks=tasks)
    caller = Principal(name="somebody", role=role)
    return rules.scope_of(caller).resolved()


def refused(within: ReadScope, path: object) -> str:
    with pytest.raises(PathRefused) as found:
        within.check(str(path))
    return f"{found.value.message} {found.value.hint}"


def test_without_roots_only_an_admin_has_anything_read(tmp_path: Path) -> None:
    scope("admin").check(str(tmp_path))
    for role in ("viewer", "worker", "operator"):
        said = refused(scope(role), tmp_path)
        assert "no data_roots are configured" in said
        assert "STRATA_DATA_ROOTS" in said
        refused(scope(role), "s3://bucket/data")


def test_roots_bound_everyone_but_an_admin(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data-of-others").mkdir()
    inside = scope("worker", tmp_path / "data", "s3://bucket/prefix/")
    inside.check(f"{tmp_path}/data/a.jsonl")
    inside.check(f"file://{tmp_path}/data")
    inside.check(f"{tmp_path}/data/*/part-?.jsonl")
    inside.check("s3://bucket/prefix")
    inside.check("s3://bucket/prefix/2024/*.parquet")
    for path in (
        f"{tmp_path}/data-of-others/a",
        f"{tmp_path}/data/../data-of-others/a",
        f"{tmp_path}/*/a",
        f"{tmp_path}/dat*",
        "s3://bucket/prefix-of-others",
        "s3://bucket/pre*",
        "s3://bucket/prefix/../other",
        "s3://bucket/prefix//../other",
        "s3://bucket/",
        "s3://other/prefix",
        "gs://bucket/prefix",
    ):
        assert "data_roots" in refused(inside, path), path
    scope("admin", tmp_path / "data").check(f"{tmp_path}/data-of-others/a")


def test_a_symlink_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "data" / "folder").symlink_to("/etc")
    inside = scope("operator", tmp_path / "data")
    said = refused(inside, tmp_path / "data" / "link")
    assert str(tmp_path / "secret") not in said, "where it leads is not for everyone"
    refused(inside, tmp_path / "data" / "folder" / "passwd")
    assert "is never read" in refused(scope("admin"), tmp_path / "data" / "folder" / "passwd")
    with open(tmp_path / "data" / "link", "rb") as opened, pytest.raises(PathRefused):
        inside.check_opened(opened.fileno(), shown="data/link")


def test_some_places_are_read_for_nobody(tmp_path: Path) -> None:
    own = tmp_path / "coordinator"
    config = tmp_path / "strata.toml"
    for role in ("admin", "worker"):
        within = scope(role, "/", private=(own, config))
        for path in (
            *("/proc/self/environ", "/sys/kernel", "/dev/null", "/etc/passwd", "/etc", "/run/secrets/token"),
            *(own, own / "tokens.json", config, tmp_path / "project" / ".env", "/tmp/../etc/shadow"),
        ):
            assert "is never read" in refused(within, path), path
        within.check(str(tmp_path / "data"))


def test_hidden_folders_of_a_home_are_read_only_where_a_root_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path / ".ssh" / "id", tmp_path / "work" / ".git" / "config", "/home/nobody-here/.aws/x"):
        assert "hidden folder" in refused(scope("admin"), path), path
    scope("admin").check(str(tmp_path / "data" / "a.csv"))
    for role in ("admin", "worker"):
        scope(role, tmp_path / ".cache" / "data").check(str(tmp_path / ".cache" / "data" / "a.csv"))


def test_urls_that_are_no_object_store_are_no_data(tmp_path: Path) -> None:
    for url in ("memory://job", "http://169.254.169.254/latest", "FILE:///etc/passwd", f"{tmp_path}/a://b"):
        for role in ("admin", "worker"):
            with pytest.raises(StrataError):
                scope(role, "/").check(url)


def test_checkpoints_of_own_tasks_may_be_verified_and_nothing_else_of_them(tmp_path: Path) -> None:
    tasks = tmp_path / "coordinator" / "tasks"
    reading = scope("operator", private=(tmp_path / "coordinator",), tasks=tasks)
    verifying = replace(reading, checkpoints=True)
    verifying.check(str(tasks / "task-1" / "checkpoints" / "a.pt"))
    for path in (tasks / "task-1" / "task.json", tasks / "checkpoints", tmp_path / "coordinator" / "x"):
        refused(verifying, path)
    refused(reading, tasks / "task-1" / "checkpoints" / "a.pt")


def test_data_that_own_tasks_have_prepared_is_read_for_an_admin_like_other_data(tmp_path: Path) -> None:
    own = tmp_path / "coordinator"
    data = own / "tasks" / "task-1" / "data"
    data.mkdir(parents=True)
    (data / "link").symlink_to(own / "tokens.json")
    admin, operator = (scope(role, private=(own,), tasks=own / "tasks") for role in ("admin", "operator"))
    admin.check(str(data / "text.index"))
    assert "Only an admin" in refused(operator, data / "text.index")
    for path in (
        *(data / "link", data / ".env", data / ".." / "task.json"),
        *(own / "tasks" / "data" / "x", own / "data" / "x"),
    ):
        assert "is never read" in refused(admin, path), path


def test_roots_that_could_never_be_read_are_a_mistake_at_the_start(tmp_path: Path) -> None:
    assert problems_of_roots([str(tmp_path), "s3://bucket", "~/data"], [tmp_path / "own"]) == []
    for root in ("/etc/data", "data", "s3://", "ftp://x/y", str(tmp_path / "own" / "x")):
        assert len(problems_of_roots([root], [tmp_path / "own"])) == 1, root


# --- a coordinator --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reading")


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Coordinator]:
    (folder / "roots").mkdir()
    rows = "".join(f'{{"text": "line {n}"}}\n' for n in range(3))
    for name in ("roots/good.jsonl", "outside.jsonl", "roots/mixed/a.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(rows)
    (folder / "roots/mixed/b.jsonl").symlink_to(folder / "outside.jsonl")
    config = folder / "strata.toml"
    lines = [f'data_roots = ["{folder}/roots"]', "[coordinator.tokens]"]
    lines += [f'{role} = "{token}"' for role, token in TOKENS.items()]
    config.write_text("\n".join(["[coordinator]", *lines, ""]))
    # Who only registers is not failed while readers of files start.
    env = {"STRATA_HEARTBEAT_TIMEOUT": "600"}
    server = Coordinator(folder / "data", "--config", str(config), env=env).start()
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.output)


def previewed(server: Coordinator, dataset: str, role: str) -> tuple[int, Any]:
    return server.call("GET", f"/api/datasets/{dataset}/preview", token=TOKENS[role])


def verified(server: Coordinator, checkpoint: str, role: str) -> tuple[int, Any]:
    """The outcome: whoever asks is told after a while that it is under way."""

    def ended() -> tuple[int, Any] | None:
        status, answer = server.post(f"/api/checkpoints/{checkpoint}/verify", {}, token=TOKENS[role])
        return None if answer.get("status") == "verifying" else (status, answer)

    found: tuple[int, Any] = eventually(ended, within_s=120, what="it is verified")
    return found


def register(server: Coordinator, role: str, **body: Any) -> tuple[int, str]:
    """Over HTTP, or for a worker over gRPC: a status as HTTP has it, and what was said."""
    if role != "worker":
        status, answer = server.post("/api/datasets", {"format": "text", **body}, token=TOKENS[role])
        return status, json.dumps(answer)
    metadata = (("authorization", f"Bearer {TOKENS[role]}"),)
    with stub(server.address) as calls:
        try:
            calls.RegisterDataset(
                pb.RegisterDatasetRequest(**{"format": "text", "shard_size": 10, **body}),
                metadata=metadata,
                timeout=120,
            )
        except grpc.RpcError as error:
            return {"PERMISSION_DENIED": 403, "INVALID_ARGUMENT": 422}[error.code().name], str(
                error.details()
            )
    return 201, ""


@pytest.mark.parametrize("role", ["worker", "admin"])
def test_nobody_reads_the_tokens_through_a_dataset(guarded: Coordinator, folder: Path, role: str) -> None:
    (folder / "roots" / "config.txt").unlink(missing_ok=True)
    (folder / "roots" / "config.txt").symlink_to(folder / "strata.toml")
    targets = {
        "config": folder / "strata.toml",
        "link": folder / "roots" / "config.txt",
        "journal": folder / "data",
        "environ": Path("/proc/self/environ"),
        "passwd": Path("/etc/passwd"),
    }
    for name, path in targets.items():
        status, said = register(guarded, role, dataset_id=f"{name}-{role}", path=str(path))
        assert status == 403, (name, status, said)
        # Where nothing is read, any path is fine; but then nobody may look at it either.
        status, said = register(guarded, role, dataset_id=f"{name}-{role}", path=str(path), total_samples=5)
        assert status == 201, said
        for reader in ("viewer", "admin"):
            status, answer = previewed(guarded, f"{name}-{role}", reader)
            assert status == 403, (name, reader, answer)
            assert not any(token in json.dumps(answer) for token in TOKENS.values())


def test_inside_the_roots_every_caller_may_count_and_preview(guarded: Coordinator, folder: Path) -> None:
    for role in ("worker", "operator", "admin"):
        path = f"{folder}/roots/good.jsonl"
        assert register(guarded, role, dataset_id=f"in-{role}", path=path, format="jsonl")[0] == 201
    status, answer = previewed(guarded, "in-worker", "viewer")
    assert (status, len(answer["samples"])) == (200, 3)
    assert answer["samples"][0]["text"]["value"] == "line 0"


def test_outside_the_roots_only_an_admin_does(guarded: Coordinator, folder: Path) -> None:
    path = f"{folder}/outside.jsonl"
    for role in ("worker", "operator"):
        status, said = register(guarded, role, dataset_id="out", path=path, format="jsonl")
        assert status == 403
        assert "data_roots" in said
        missing = register(guarded, role, dataset_id="out", path=f"{folder}/none.jsonl", format="jsonl")
        assert missing[1].replace("none.jsonl", "outside.jsonl") == said, "whether it exists is not told"
    assert register(guarded, "admin", dataset_id="out", path=path, format="jsonl")[0] == 201
    assert previewed(guarded, "out", "viewer")[0] == 403
    assert previewed(guarded, "out", "admin")[0] == 200


def test_a_link_in_a_datasets_folder_that_leads_outside_is_refused(
    guarded: Coordinator, folder: Path
) -> None:
    for path in (f"{folder}/roots/mixed", f"{folder}/roots/mix*/*.jsonl"):
        status, said = register(guarded, "operator", dataset_id="mixed", path=path, format="jsonl")
        assert status == 403, said
        assert "b.jsonl" in said
    # A file that becomes a link after it was counted.
    shutil.copytree(folder / "roots" / "mixed", folder / "roots" / "later")
    assert (
        register(guarded, "operator", dataset_id="later", path=f"{folder}/roots/later", format="jsonl")[0]
        == 201
    )
    os.unlink(folder / "roots/later/a.jsonl")
    (folder / "roots/later/a.jsonl").symlink_to(folder / "outside.jsonl")
    assert previewed(guarded, "later", "viewer")[0] == 403


def test_a_checkpoint_is_verified_only_where_its_verifier_may_read(
    guarded: Coordinator, folder: Path
) -> None:
    with stub(guarded.address) as calls:
        admin = (("authorization", f"Bearer {TOKENS['admin']}"),)
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="author"), metadata=admin)
        for name, place in (
            ("inside", folder / "roots" / "ckpt"),
            ("outside", folder / "ckpt"),
            ("task", guarded.data_dir / "tasks" / "task-1" / "checkpoints"),
        ):
            with CheckpointManager(path=str(place)) as manager:
                info = manager.save({"w": torch.zeros(100)}, step=1).result(60)
            calls.NotifyCheckpoint(
                pb.NotifyCheckpointRequest(
                    worker_id="author",
                    checkpoint_id=info.checkpoint_id,
                    path=info.path,
                    size_bytes=info.size_bytes,
                    status=pb.CHECKPOINT_STATUS_COMPLETED,
                ),
                metadata=admin,
            )
            for role in ("operator", "admin"):
                status, answer = verified(guarded, info.checkpoint_id, role)
                if (name, role) == ("outside", "operator"):
                    assert status == 403, answer
                else:
                    assert (status, answer["status"]) == (200, "whole"), (name, role, answer)


def test_previews_can_be_switched_off(folder: Path) -> None:
    (folder / "dark.jsonl").write_text('{"text": "a line"}\n')
    server = Coordinator(folder / "dark", env={"STRATA_PREVIEWS": "false"}).start()
    try:
        body = {"dataset_id": "d", "path": f"{folder}/dark.jsonl", "format": "jsonl"}
        assert server.post("/api/datasets", body)[0] == 201, "counting is another thing"
        status, answer = server.call("GET", "/api/datasets/d/preview")
        assert status == 403
        assert "switched off" in answer["message"]
    finally:
        server.stop()
