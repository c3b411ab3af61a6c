"""URLs and environment variables lead to the right store, or say what to write instead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata.errors import StrataError
from strata.stores import InvalidStoreURL, StorageBackend, Store, open_store, store_from_env
from strata.stores.local import LocalStore
from strata.stores.memory import MemoryStore
from strata.stores.object import ObjectStore

KEYS = {"access_key_id": "x", "secret_access_key": "y", "region": "us-east-1"}
GOOGLE = {"skip_signature": True}
AZURE = {"account_name": "account", "account_key": "a2V5"}


def test_a_directory_is_local(tmp_path: Path) -> None:
    for url in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"file://localhost{tmp_path}", f"{tmp_path}/"):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path
        assert (store.tier, store.url) == ("NVME", f"file://{tmp_path}")


def test_a_relative_directory_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("checkpoints").url == f"file://{tmp_path}/checkpoints"


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/checkpoints").url == f"file://{tmp_path}/checkpoints"


@pytest.mark.parametrize("name", ["plain", "with space", "50%", "a#b", "what?", "é"])
def test_the_url_of_a_store_opens_the_same_store(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path / name)
    store.put("k", b"x")
    assert open_store(store.url).read("k") == b"x"


def test_escapes_in_a_file_url_are_undone(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/with%20space")
    store.put("k", b"x")
    assert (tmp_path / "with space/k").read_bytes() == b"x"


def test_memory_is_a_job(tmp_path: Path) -> None:
    store = open_store("memory://job-1", shm=tmp_path, limit_bytes=100)
    assert isinstance(store, MemoryStore)
    assert (store.tier, store.url, store.limit_bytes) == ("MEMORY", "memory://job-1", 100)


@pytest.mark.parametrize(
    ("url", "tier", "shown", "options"),
    [
        ("s3://bucket", "S3", "s3://bucket", KEYS),
        ("s3://bucket/a/prefix/", "S3", "s3://bucket/a/prefix", KEYS),
        ("s3a://bucket/p", "S3", "s3://bucket/p", KEYS),
        ("gs://bucket/p", "GCS", "gs://bucket/p", GOOGLE),
        ("gcs://bucket", "GCS", "gs://bucket", GOOGLE),
        ("az://container/p", "AZURE", "az://container/p", AZURE),
        ("azure://container", "AZURE", "az://container", AZURE),
    ],
)
def test_object_storage_by_scheme(url: str, tier: str, shown: str, options: dict[str, str]) -> None:
    store = open_store(url, **options)
    assert isinstance(store, ObjectStore)
    assert (store.tier, store.url) == (tier, shown)


@pytest.mark.parametrize(
    ("url", "instead"),
    [
        ("", "s3://bucket/prefix"),
        ("nul\0", "/dir"),
        ("http://host/path", "s3://bucket/prefix"),
        ("s4://bucket", "s3://bucket/prefix"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///prefix", "s3://bucket/prefix"),
        ("file://nvme/checkpoints", "file:///nvme/checkpoints"),
        ("file://", "file:///dir"),
        ("memory://", "memory://job"),
        ("memory://job/path", "memory://job"),
        ("memory://bad name", "memory://job"),
        ("s3://bucket/p?region=x", "keyword arguments"),
        ("s3://bucket/p#x", "keyword arguments"),
        ("s3://[bucket", "s3://bucket/prefix"),
    ],
)
def test_a_bad_url_says_what_to_write_instead(url: str, instead: str) -> None:
    with pytest.raises(InvalidStoreURL) as caught:
        open_store(url)
    assert instead in caught.value.hint
    assert isinstance(caught.value, StrataError)
    assert isinstance(caught.value, ValueError)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidStoreURL, match="contains credentials") as caught:
        open_store("s3://key:hunter2@bucket/p")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(vars(caught.value))


def test_the_prefix_of_a_bucket_follows_the_rules_of_keys() -> None:
    with pytest.raises(ValueError, match="cannot be a key"):
        open_store("s3://bucket/a/../b", **KEYS)


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({"STORAGE_BACKEND": "local", "CHECKPOINT_BUCKET": "/data/x"}, "file:///data/x"),
        ({"CHECKPOINT_BUCKET": "/data/x"}, "file:///data/x"),
        ({"CHECKPOINT_BUCKET": "file:///data/x"}, "file:///data/x"),
        ({"STORAGE_BACKEND": "S3", "CHECKPOINT_BUCKET": "my-ml-checkpoints"}, "s3://my-ml-checkpoints"),
        ({"STORAGE_BACKEND": "s3", "CHECKPOINT_BUCKET": "bucket/prefix"}, "s3://bucket/prefix"),
        ({"CHECKPOINT_BUCKET": "s3://bucket/prefix"}, "s3://bucket/prefix"),
        ({"CHECKPOINT_DIR": "/data/x"}, "file:///data/x"),
        ({"CHECKPOINT_DIR": "/data/x", "CHECKPOINT_BUCKET": "s3://bucket"}, "s3://bucket"),
        (
            {"STORAGE_BACKEND": "local", "CHECKPOINT_DIR": "/data/x", "CHECKPOINT_BUCKET": "bucket"},
            "file:///data/x",
        ),
        ({"STORAGE_BACKEND": "s3", "CHECKPOINT_DIR": "/data/x", "CHECKPOINT_BUCKET": "b"}, "s3://b"),
    ],
)
def test_the_environment_names_a_store(environment: dict[str, str], url: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "us-west-2"}
    assert store_from_env({**environment, **keys}).url == url


@pytest.mark.parametrize(
    ("environment", "instead"),
    [
        ({}, "CHECKPOINT_BUCKET="),
        ({}, "CHECKPOINT_DIR="),
        ({"STORAGE_BACKEND": "s3"}, "CHECKPOINT_BUCKET="),
        ({"STORAGE_BACKEND": "s3", "CHECKPOINT_DIR": "/data/x"}, "CHECKPOINT_BUCKET="),
        ({"STORAGE_BACKEND": "tape", "CHECKPOINT_DIR": "/data/x"}, "STORAGE_BACKEND=local, s3,"),
        ({"CHECKPOINT_BUCKET": "bucket"}, "STORAGE_BACKEND=local, s3, gcs, azure or memory"),
        (
            {"STORAGE_BACKEND": "tape", "CHECKPOINT_BUCKET": "bucket"},
            "STORAGE_BACKEND=local, s3, gcs, azure or memory",
        ),
    ],
)
def test_an_unclear_environment_says_what_to_set(environment: dict[str, str], instead: str) -> None:
    with pytest.raises(InvalidStoreURL) as caught:
        store_from_env(environment)
    assert instead in caught.value.hint


def test_the_public_name_of_the_protocol() -> None:
    assert StorageBackend is Store


def test_stores_work_without_the_object_storage_library(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules['obstore'] = None\n"
        "from strata.errors import MissingDependency\n"
        "from strata.stores import open_store\n"
        "open_store(sys.argv[1]).put('k', b'x')\n"
        "try:\n"
        "    open_store('s3://bucket')\n"
        "except MissingDependency as error:\n"
        "    assert 'strata-runtime[s3]' in error.hint\n"
        "else:\n"
        "    sys.exit('opened')\n"
        "assert not {'torch', 'fastapi', 'pyarrow', 'grpc'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "values")], check=True, timeout=60)
