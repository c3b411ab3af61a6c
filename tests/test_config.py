"""One configuration from file, environment and flags; everything that is wrong with it at once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from strata.config import ConfigError, documented, environment, read_env_file
from strata.coordinator.settings import CoordinatorSettings, read_settings
from strata.environment import KNOWN, SAFE


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def problems(**kwargs: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_settings(**{"environ": {}, **kwargs})  # type: ignore[arg-type]
    return caught.value.problems


def test_defaults_stand_where_nobody_says_otherwise() -> None:
    settings = read_settings(environ={})
    assert (settings.host, settings.grpc_port, settings.http_port) == ("127.0.0.1", 50051, 3000)
    assert settings.heartbeat_timeout == 30.0
    assert settings.data_dir == Path.home() / ".strata"


def test_flags_win_over_the_environment_and_the_environment_over_the_file(tmp_path: Path) -> None:
    file = write(
        tmp_path / "strata.toml",
        "[coordinator]\ngrpc_port = 1001\nhttp_port = 1002\nheartbeat_timeout = 11\nhost = 'localhost'\n",
    )
    settings = read_settings(
        file=file,
        environ={"STRATA_HTTP_PORT": "2002", "STRATA_HEARTBEAT_TIMEOUT": "12"},
        flags={"heartbeat_timeout": 13.0, "grpc_port": None},
    )
    assert settings.host == "localhost"
    assert (settings.grpc_port, settings.http_port, settings.heartbeat_timeout) == (1001, 2002, 13.0)


def test_dotenv_is_read_and_the_environment_wins_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / ".env", "STRATA_GRPC_PORT='1234'\nSTRATA_HTTP_PORT=1235\n# a remark\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRATA_HTTP_PORT", "4321")
    monkeypatch.delenv("STRATA_GRPC_PORT", raising=False)
    settings = read_settings()
    assert (settings.grpc_port, settings.http_port) == (1234, 4321)


def test_dotenv_sets_no_secret_no_address_and_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in sorted(KNOWN):
        monkeypatch.delenv(name, raising=False)
    lines = [f"{name}=5" if name in SAFE else f"{name}=planted" for name in sorted(KNOWN)]
    write(tmp_path / ".env", "\n".join([*lines, "STRATA_JOB_ID=${HOME}", "PASSWORD_OF_SOMETHING_ELSE=x"]))
    monkeypatch.chdir(tmp_path)
    found = environment()
    assert [name for name, value in found.items() if value == "planted"] == []
    assert found["STRATA_HTTP_PORT"] == "5"
    assert found["STRATA_JOB_ID"] == "${HOME}"
    for name in (
        "STRATA_TOKEN",
        "STRATA_API_URL",
        "COORDINATOR_ADDR",
        "STRATA_RECIPES_DIR",
        "STRATA_PRELOAD",
    ):
        assert name in caplog.text
    assert "--env-file" in caplog.text
    assert "PASSWORD_OF_SOMETHING_ELSE" not in caplog.text
    assert {name for name in KNOWN if "TOKEN" in name or "KEY" in name or "URL" in name} & SAFE == set()
    assert read_env_file(tmp_path / ".env")["STRATA_TOKEN"] == "planted"
    with pytest.raises(ConfigError, match="there is no file"):
        read_env_file(tmp_path / "nothing")


def test_unreadable_dotenv_is_a_problem_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_bytes(b"STRATA_TOKEN=\xff\xfe\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"\.env"):
        read_settings()


def test_every_problem_is_reported_at_once_with_its_position(tmp_path: Path) -> None:
    file = write(
        tmp_path / "strata.toml",
        "[coordinator]\nhearbeat_timeout = 5\nhttp_port = 'many'\nmax_workers = 0\nhost = '0.0.0.0'\n"
        "nonsense = 1\ntls_cert = 'c.pem'\n",
    )
    found = problems(
        file=file, environ={"STRATA_GRPC_PORT": "70000"}, flags={"heartbeat_timeout": float("nan")}
    )
    text = "\n".join(found)
    for words in (
        f"coordinator.hearbeat_timeout in {file}",
        "did you mean 'heartbeat_timeout'?",
        f"coordinator.http_port in {file}: must be a whole number, not 'many'",
        f"coordinator.max_workers in {file}: must be between 1 and 1,000,000, not 0",
        "coordinator.nonsense",
        "known are advertise, agent_grace, allowed_hosts",
        "the environment variable STRATA_GRPC_PORT: must be between 0 and 65,535, not 70000",
        "--heartbeat-timeout: must be a finite number, not nan",
        "0.0.0.0 can be reached from other machines",
        "tls_cert and tls_key belong together",
    ):
        assert words in text
    assert len(found) == 8


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("grpc_port = 3.5", "must be a whole number, not 3.5"),
        ("grpc_port = true", "must be a whole number, not True"),
        ("grpc_port = [1]", "must be a whole number, not [1]"),
        ("grpc_port = 99999999999999999999999999", "between 0 and 65,535"),
        ("heartbeat_timeout = inf", "must be a finite number, not inf"),
        ("heartbeat_timeout = -1", "between 0.1 and 86,400, not -1"),
        ("host = 5", "must be text, not 5"),
        ("host = ['a']", "must be text"),
        ("host = ''", "must not be empty"),
        ("data_dir = false", "must be a path, not False"),
        ("tokens = 'secret'", "must be a table"),
        ("tokens = {viewer = 5}", "tokens.viewer must be text"),
        ("tokens = {king = 'x'}", "tokens.king is not a role"),
        ("tokens = {viewer = ''}", "tokens.viewer is empty"),
        ("tokens = {viewer = 'same', operator = 'same'}", "viewer and operator share one token"),
        ("heartbeat_timeout = 1\nheartbeat_interval = 2", "must be longer than heartbeat_interval"),
        ("grpc_port = 7\nhttp_port = 7", "give each its own"),
        ("tls_client_ca = 'ca.pem'", "tls_client_ca needs tls_cert and tls_key"),
    ],
)
def test_wrong_value_says_what_it_must_be(tmp_path: Path, line: str, words: str) -> None:
    found = problems(file=write(tmp_path / "c.toml", f"[coordinator]\n{line}\n"))
    assert words in "\n".join(found)


def test_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    assert "does not exist" in problems(file=tmp_path / "none.toml")[0]
    assert "cannot be read" in problems(file=tmp_path)[0]
    assert "is not valid TOML" in problems(file=write(tmp_path / "a.toml", "[coordinator"))[0]
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    assert "cannot be read" in problems(file=tmp_path / "b.toml")[0]
    assert "must be a table" in problems(file=write(tmp_path / "c.toml", "coordinator = 5"))[0]


def test_misspelt_section_is_a_problem_and_others_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = problems(file=write(tmp_path / "a.toml", "[cordinator]\ngrpc_port = 1\n"))
    assert "did you mean [coordinator]?" in found[0]
    with caplog.at_level(logging.WARNING):
        settings = read_settings(file=write(tmp_path / "b.toml", "[training]\nlr = 1\n"), environ={})
    assert settings == read_settings(environ={})
    assert "changes nothing; known tables: [coordinator], [notify]" in caplog.text


def test_a_key_outside_a_table_is_a_problem(tmp_path: Path) -> None:
    found = problems(file=write(tmp_path / "a.toml", "http_port = 4000\n"))
    assert found == [f"http_port in {tmp_path / 'a.toml'} is outside a table; put it below [coordinator]"]


def test_open_address_needs_a_token_or_client_certificates(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.5", "example.org"):
        assert "can be reached from other machines" in problems(environ={"STRATA_HOST": host})[0]
        assert (
            read_settings(environ={"STRATA_HOST": host, "STRATA_TOKEN": "a-secret-of-some-length"}).host
            == host
        )
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert read_settings(environ={"STRATA_HOST": host}).host == host
    tls = {"STRATA_TLS_CERT": "c", "STRATA_TLS_KEY": "k"}
    assert problems(environ={"STRATA_HOST": "::", **tls})
    assert read_settings(environ={"STRATA_HOST": "::", **tls, "STRATA_TLS_CLIENT_CA": "ca"}).host == "::"


def test_secrets_stay_out_of_what_is_printed() -> None:
    settings = read_settings(environ={"STRATA_TOKEN": "very-secret"})
    assert "very-secret" not in repr(settings)


def test_a_secret_that_is_wrong_is_not_printed(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "[coordinator]\ntokens = 'very-secret'\n")
    (problem,) = problems(file=file)
    assert problem == f"coordinator.tokens in {file}: must be a table of keys"


def test_every_setting_is_documented() -> None:
    rows = documented(CoordinatorSettings)
    assert all(meaning.endswith(".") for _, _, _, meaning in rows)
    variables = [variable for _, _, variable, _ in rows if variable]
    assert (
        len(variables) == len(set(variables)) == len(rows) - 3
    )  # tokens, roles of certificates and prices of runs come from the file alone


def test_the_documentation_shows_every_setting_as_it_is() -> None:
    page = (Path(__file__).parents[1] / "docs/operating/configuration.md").read_text()
    shown = page.partition("|---|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    data_dir = str(Path.home() / ".strata")
    assert shown == [
        f"| `{key}` | `{default.replace(data_dir, '~/.strata')}` | {variable and f'`{variable}`'} | {meaning} |"
        for key, default, variable, meaning in documented(CoordinatorSettings)
    ]
