"""What a real S3 server behind a bad network, or a bad configuration, does to the object store: a typed error
that names the next step, or nothing at all."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.stores import (
    AccessDenied,
    AlreadyExists,
    Misconfigured,
    NoCredentials,
    NotFound,
    Store,
    StoreError,
    Unavailable,
    open_store,
    store_from_env,
)
from tests.support import eventually
from tests.support_s3_proxy import Answer, CutBody, Hang, LoseReply, Request, Reset, S3Proxy, s3_proxy
from tests.support_seaweed import READER_KEY, SECRET_KEY, WRITER_KEY, Seaweed

pytestmark = pytest.mark.s3

PART_BYTES = 5 << 20
LARGE = bytes(range(256)) * (12 << 12)  # Three parts.


@pytest.fixture
def proxy(s3_server: Seaweed) -> Iterator[S3Proxy]:
    with s3_proxy(s3_server.endpoint) as running:
        yield running


@pytest.fixture
def url() -> str:
    return f"s3://faults/{uuid.uuid4().hex[:12]}"


@pytest.fixture
def plain(s3_server: Seaweed, url: str) -> Store:
    """The same place, undisturbed."""
    store = open_store(url, **s3_server.options())
    store.put("here", b"so the bucket exists")
    return store


@pytest.fixture
def store(s3_server: Seaweed, proxy: S3Proxy, url: str, plain: Store) -> Store:
    return open_disturbed(s3_server, proxy, url)


def open_disturbed(s3_server: Seaweed, proxy: S3Proxy, url: str, **more: Any) -> Store:
    settings: dict[str, Any] = {"part_bytes": PART_BYTES, "max_retries": 2, "retry_budget_s": 20.0}
    return open_store(url, **s3_server.options(endpoint=proxy.endpoint, **settings, **more))


def is_put(request: Request) -> bool:
    return request.method == "PUT"


def is_part(request: Request) -> bool:
    return request.method == "PUT" and "partNumber=" in request.path


def is_complete(request: Request) -> bool:
    """The last call of a multipart upload."""
    return request.method == "POST" and "uploadId=" in request.path


def is_get(request: Request) -> bool:
    return request.method == "GET" and "list-type" not in request.path


# --- what passes by itself ---


@pytest.mark.parametrize("spoil", [Answer(500), Answer(503, "SlowDown"), Reset(), LoseReply()], ids=str)
@pytest.mark.parametrize("value", [b"small", LARGE], ids=["small", "large"])
def test_a_passing_fault_while_writing_is_not_noticed(
    store: Store, plain: Store, proxy: S3Proxy, spoil: Any, value: bytes
) -> None:
    proxy.spoil(spoil, when=is_put, times=2)
    store.put("k", value)
    assert len(proxy.spoilt) == 2
    assert plain.read("k") == value


@pytest.mark.parametrize("spoil", [Answer(500), Reset(), LoseReply(), CutBody(0), CutBody(100)], ids=str)
@pytest.mark.parametrize("value", [b"small" * 100, LARGE], ids=["small", "large"])
def test_a_passing_fault_while_reading_is_not_noticed(
    store: Store, plain: Store, proxy: S3Proxy, spoil: Any, value: bytes
) -> None:
    plain.put("k", value)
    proxy.spoil(spoil, when=is_get, times=2)
    assert store.read("k") == value
    assert len(proxy.spoilt) == 2


def test_listing_and_deleting_ride_over_passing_faults(store: Store, plain: Store, proxy: S3Proxy) -> None:
    plain.put("k", b"x")
    proxy.spoil(Answer(503, "SlowDown"), times=2)
    assert [blob.key for blob in store.list()] == ["here", "k"]
    proxy.spoil(LoseReply(), when=lambda request: request.method == "DELETE", times=1)
    store.delete("k")
    assert plain.stat("k") is None


# --- replies that get lost ---


@pytest.mark.parametrize("how", ["put", "writer"])
@pytest.mark.parametrize("lost", [1, 2, 4, 20])
def test_a_lost_reply_to_the_last_call_of_an_upload_is_success(
    store: Store, plain: Store, proxy: S3Proxy, lost: int, how: str
) -> None:
    """The server has the object; the retry learns that the upload no longer exists."""
    proxy.spoil(LoseReply(), when=is_complete, times=lost)
    if how == "put":
        store.put("k", LARGE)
    else:
        with store.open_write("k") as writer:
            writer.write(LARGE)
            writer.commit()
    assert proxy.spoilt
    assert plain.read("k") == LARGE


@pytest.mark.parametrize("lost", [1, 3])
def test_a_retry_that_finds_its_own_object_has_succeeded(
    store: Store, plain: Store, proxy: S3Proxy, lost: int
) -> None:
    proxy.spoil(LoseReply(), when=is_put, times=lost)
    store.put("manifest", b"mine", if_absent=True)
    assert plain.read("manifest") == b"mine"
    assert [request.headers.get("if-none-match") for request in proxy.spoilt] == ["*"] * len(proxy.spoilt)


def test_a_retry_that_finds_anothers_equal_object_has_lost(
    store: Store, plain: Store, proxy: S3Proxy
) -> None:
    """Equal bytes are not the same write: exactly one writer may believe that it was first."""
    plain.put("manifest", b"same bytes", if_absent=True)
    proxy.spoil(Answer(500), when=is_put, times=1)
    with pytest.raises(AlreadyExists):
        store.put("manifest", b"same bytes", if_absent=True)


def test_a_conflict_that_leaves_no_object_is_tried_again(store: Store, plain: Store, proxy: S3Proxy) -> None:
    """Servers answer 409 to writers that collide, without keeping either."""
    proxy.spoil(Answer(409, "ConditionalRequestConflict"), when=is_put, times=2)
    store.put("manifest", b"mine", if_absent=True)
    assert len(proxy.spoilt) == 2
    assert plain.read("manifest") == b"mine"


def test_when_every_reply_is_lost_the_object_still_counts(store: Store, plain: Store, proxy: S3Proxy) -> None:
    proxy.spoil(LoseReply(), when=is_put)
    store.put("k", b"value")
    store.put("manifest", b"value", if_absent=True)
    assert plain.read("k") == plain.read("manifest") == b"value"


# --- what does not pass ---


@pytest.mark.parametrize("spoil", [Answer(500), Answer(503, "SlowDown"), Reset()], ids=str)
def test_a_persistent_outage_is_unavailable_and_keeps_the_old_value(
    s3_server: Seaweed, plain: Store, proxy: S3Proxy, url: str, spoil: Any
) -> None:
    plain.put("k", b"old")
    store = open_disturbed(s3_server, proxy, url)
    proxy.spoil(spoil)

    def stream() -> None:
        with store.open_write("k") as writer:
            writer.write(LARGE)
            writer.commit()

    calls: list[Any] = [
        lambda: store.put("k", b"new"),
        lambda: store.put("k", LARGE),
        lambda: store.put("new", b"new", if_absent=True),
        stream,
        lambda: store.read("k"),
        lambda: store.stat("k"),
        lambda: list(store.list()),
        lambda: store.delete("k"),
    ]
    for call in calls:
        with pytest.raises(Unavailable, match=r"^\[S3\]") as caught:
            call()
        assert caught.value.hint
        assert "Debug source" not in str(caught.value)
    assert plain.read("k") == b"old"
    assert plain.stat("new") is None


@pytest.mark.parametrize("how", ["abort", "fail", "fail to stream"])
def test_an_upload_that_is_given_up_is_ended_on_the_server(
    store: Store, plain: Store, proxy: S3Proxy, how: str
) -> None:
    """So that its parts are not kept, and paid for, until a lifecycle rule finds them."""
    if how != "abort":
        proxy.spoil(Answer(403, "AccessDenied"), when=lambda request: "partNumber=2" in request.path)
    with contextlib.suppress(AccessDenied):
        if how == "fail":
            store.put("k", LARGE)
        else:
            with store.open_write("k") as writer:
                writer.write(LARGE)
                if how != "abort":
                    writer.commit()
    ended = [request for request in proxy.seen if request.method == "DELETE" and "uploadId=" in request.path]
    assert len(ended) == 1
    assert plain.stat("k") is None


def test_a_server_that_never_answers_costs_no_more_than_the_budget(
    s3_server: Seaweed, plain: Store, proxy: S3Proxy, url: str
) -> None:
    plain.put("k", b"old")
    store = open_disturbed(s3_server, proxy, url, request_timeout_s=0.3)
    proxy.spoil(Hang())
    for call in (
        lambda: store.put("k", b"new"),
        lambda: store.read("k"),
        lambda: store.put("m", b"", if_absent=True),
    ):
        began_s = time.monotonic()
        with pytest.raises(Unavailable):
            call()
        assert time.monotonic() - began_s < 20
    # Two retries each, and a last look for what was written. The proxy may hear of a try after it was given up.
    eventually(lambda: len(proxy.spoilt) >= 9, within_s=30, what=lambda: f"nine attempts: {proxy.spoilt}")
    assert len(proxy.spoilt) <= 12
    assert plain.read("k") == b"old"


def test_a_budget_of_time_ends_retries_before_their_number_does(
    s3_server: Seaweed, plain: Store, proxy: S3Proxy, url: str
) -> None:
    options = s3_server.options(endpoint=proxy.endpoint, max_retries=1000, retry_budget_s=0.5)
    store = open_store(url, **options)
    proxy.spoil(Answer(503, "SlowDown"))
    for call in (
        lambda: store.put("k", b"x"),
        lambda: store.put("k", b"x", if_absent=True),
        lambda: store.read("here"),
    ):
        with pytest.raises(Unavailable):
            call()
    assert len(proxy.spoilt) < 100


def test_a_body_that_always_breaks_off_is_unavailable_never_short(
    store: Store, plain: Store, proxy: S3Proxy
) -> None:
    plain.put("k", LARGE)
    proxy.spoil(CutBody(1000), when=is_get)
    with pytest.raises(Unavailable):
        store.read("k")
    with pytest.raises(Unavailable):
        store.read_into("k", memoryview(bytearray(100_000)))


def test_an_unreachable_server_is_unavailable(url: str) -> None:
    options = {
        "endpoint": "http://127.0.0.1:1",
        "access_key_id": "x",
        "secret_access_key": "y",
        "region": "us-east-1",
    }
    store = open_store(url, **options, max_retries=1, retry_budget_s=1.0)
    with pytest.raises(Unavailable, match="endpoint"):
        store.put("k", b"x")


# --- permissions and configuration ---


def test_access_denied_names_the_missing_permission(s3_server: Seaweed, plain: Store, url: str) -> None:
    plain.put("k", LARGE)
    reader = open_store(url, **s3_server.options(READER_KEY))
    writer = open_store(url, **s3_server.options(WRITER_KEY))
    calls: list[tuple[str, Any]] = [
        ("s3:PutObject", lambda: reader.put("new", b"x")),
        ("s3:PutObject", lambda: reader.put("new", LARGE)),
        ("s3:PutObject", lambda: reader.put("new", b"x", if_absent=True)),
        ("s3:DeleteObject", lambda: reader.delete("k")),
        ("s3:GetObject", lambda: writer.read("k")),
        ("s3:GetObject", lambda: writer.stat("k")),
        ("s3:ListBucket", lambda: list(writer.list())),
    ]
    for permission, call in calls:
        with pytest.raises(AccessDenied, match=permission) as caught:
            call()
        assert "AccessDenied" in str(caught.value)
        assert permission in caught.value.reason
    assert reader.read("k") == LARGE
    assert plain.stat("new") is None


def test_a_403_is_not_retried(store: Store, proxy: S3Proxy) -> None:
    proxy.spoil(Answer(403, "AccessDenied"), when=is_put)
    with pytest.raises(AccessDenied, match="s3:PutObject"):
        store.put("k", b"x")
    assert len(proxy.spoilt) == 1


def test_whoever_may_only_write_still_learns_who_was_first(
    s3_server: Seaweed, url: str, plain: Store
) -> None:
    writer = open_store(url, **s3_server.options(WRITER_KEY))
    writer.put("manifest", b"1", if_absent=True)
    with pytest.raises(AlreadyExists):
        writer.put("manifest", b"2", if_absent=True)
    assert plain.read("manifest") == b"1"


@pytest.mark.parametrize("change", [{"access_key_id": "nobody"}, {"secret_access_key": "wrong"}], ids=str)
def test_wrong_credentials_are_distinguished_from_missing_permissions(
    s3_server: Seaweed, url: str, change: dict[str, str]
) -> None:
    store = open_store(url, **{**s3_server.options(), **change})
    with pytest.raises(AccessDenied, match="credentials are wrong"):
        store.put("k", b"x")


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment that knows no AWS, with an empty home."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def test_no_credentials_is_said_in_the_words_of_the_guide(no_aws: pytest.MonkeyPatch) -> None:
    no_aws.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(NoCredentials, match=r"^\[S3\] NoCredentialsError") as caught:
        open_store("s3://bucket/prefix")
    assert "aws configure" in str(caught.value)
    assert caught.value.reason == "NoCredentialsError"


@pytest.mark.parametrize("spoil", [Answer(403), Answer(404), Reset()], ids=str)
def test_a_machine_without_a_role_has_no_credentials(
    no_aws: pytest.MonkeyPatch, proxy: S3Proxy, spoil: Any
) -> None:
    proxy.spoil(spoil)
    store = open_store("s3://bucket", metadata_endpoint=proxy.endpoint, max_retries=1, retry_budget_s=2.0)
    for call in (lambda: store.put("k", b"x"), lambda: store.read("k"), lambda: list(store.list())):
        with pytest.raises(NoCredentials, match="NoCredentialsError"):
            call()
    assert proxy.spoilt


def test_credentials_of_aws_configure_are_used(
    no_aws: pytest.MonkeyPatch, tmp_path: Path, s3_server: Seaweed, url: str, plain: Store
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        f"[default]\naws_access_key_id = nobody\naws_secret_access_key = x\n"
        f"[work]\naws_access_key_id = strata\naws_secret_access_key = {SECRET_KEY}\n"
    )
    (tmp_path / ".aws/config").write_text("[profile work]\nregion = eu-central-1\n")
    no_aws.setenv("AWS_PROFILE", "work")
    store = open_store(url, endpoint=s3_server.endpoint)
    assert store.read("here") == b"so the bucket exists"
    no_aws.setenv("AWS_PROFILE", "default")
    with pytest.raises(AccessDenied):
        open_store(url, endpoint=s3_server.endpoint).put("k", b"x")


def test_a_missing_bucket_is_not_an_empty_store(s3_server: Seaweed) -> None:
    store = open_store("s3://no-such-bucket", **s3_server.options())
    for call in (lambda: list(store.list()), lambda: store.stat("k"), lambda: store.read("k")):
        with pytest.raises(Misconfigured, match="NoSuchBucket") as caught:
            call()
        assert "aws s3 mb s3://no-such-bucket" in caught.value.hint


@pytest.mark.parametrize(
    "spoil",
    [Answer(400, "AuthorizationHeaderMalformed", "expecting 'eu-west-1'"), Answer(301, "PermanentRedirect")],
)
def test_another_region_is_said_to_be_one(store: Store, proxy: S3Proxy, spoil: Any) -> None:
    proxy.spoil(spoil)
    for call in (lambda: store.put("k", b"x"), lambda: list(store.list())):
        with pytest.raises(Misconfigured, match="AWS_REGION"):
            call()


def test_plain_http_leaves_this_machine_only_when_asked(no_aws: pytest.MonkeyPatch) -> None:
    options = {"endpoint": "http://storage.example:9000", "access_key_id": "x", "secret_access_key": "y"}
    with pytest.raises(Misconfigured, match="AWS_ALLOW_HTTP=true"):
        open_store("s3://bucket", **options)
    open_store("s3://bucket", **options, allow_http=True)
    no_aws.setenv("AWS_ALLOW_HTTP", "true")
    open_store("s3://bucket", **options)


@pytest.mark.parametrize("endpoint", ["localhost:9000", "ftp://x", "http://", "http://host:port"])
def test_a_bad_endpoint_is_refused_at_once(no_aws: pytest.MonkeyPatch, endpoint: str) -> None:
    no_aws.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(Misconfigured, match="AWS_ENDPOINT_URL=https://host:port"):
        open_store("s3://bucket", access_key_id="x", secret_access_key="y")


def test_a_store_from_the_environment_works(s3_server: Seaweed, url: str, plain: Store) -> None:
    environment = {
        "STORAGE_BACKEND": "s3",
        "CHECKPOINT_BUCKET": url.removeprefix("s3://"),
        **s3_server.environment(),
    }
    store = store_from_env(environment)
    assert store.url == url
    assert store.read("here") == b"so the bucket exists"


def test_secrets_are_not_shown(s3_server: Seaweed, url: str) -> None:
    store = open_store(url, **s3_server.options(access_key="nobody"))
    with pytest.raises(StoreError) as caught:
        store.put("k", LARGE)
    for text in (repr(store), str(caught.value), repr(vars(store))):
        assert SECRET_KEY not in text


# --- several versions ---


def test_a_read_in_parts_never_mixes_two_versions(
    s3_server: Seaweed, plain: Store, proxy: S3Proxy, url: str
) -> None:
    """The value is replaced after the first part was read."""
    old, new = b"o" * len(LARGE), b"n" * len(LARGE)
    plain.put("k", old)
    store = open_disturbed(s3_server, proxy, url, max_concurrency=1)
    replaced = False

    def replace_before_the_second_part(request: Request) -> bool:
        nonlocal replaced
        if is_get(request) and not replaced and not request.headers["range"].startswith("bytes=0-"):
            replaced = True
            plain.put("k", new)
        return False

    proxy.spoil(Reset(), when=replace_before_the_second_part)
    assert store.read("k") == new
    assert replaced


def test_a_value_replaced_many_times_over_while_it_is_read_is_read_in_the_end(
    store: Store, plain: Store, proxy: S3Proxy
) -> None:
    plain.put("k", b"version 0")
    versions = iter(range(1, 21))

    def replace_before_it_is_read(request: Request) -> bool:
        if is_get(request) and (version := next(versions, None)):
            plain.put("k", b"version %d" % version)
        return False

    proxy.spoil(Reset(), when=replace_before_it_is_read)
    assert store.read("k") == b"version 20"


def test_a_value_deleted_while_it_is_read_is_not_found(
    s3_server: Seaweed, plain: Store, proxy: S3Proxy, url: str
) -> None:
    plain.put("k", LARGE)
    store = open_disturbed(s3_server, proxy, url, max_concurrency=1)

    def delete_before_the_second_part(request: Request) -> bool:
        if is_get(request) and not request.headers["range"].startswith("bytes=0-"):
            plain.delete("k")
        return False

    proxy.spoil(Reset(), when=delete_before_the_second_part)
    with pytest.raises(NotFound):
        store.read("k")
