"""Reference pages made from what they describe: the command line, the Python faces, the HTTP API and the gRPC contract.

Nothing here is written by hand twice: commands and options come from the CLI itself, HTTP calls from a running coordinator's
`/openapi.json`, messages from the proto file with its comments, Python names from the public modules (mkdocstrings reads
their docstrings). Each function returns the Markdown of one page.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FACES = (
    "strata.training",
    "strata.checkpoint",
    "strata.checkpoint.dcp",
    "strata.data",
    "strata.stores",
    "strata.client",
    "strata.sinks",
    "strata.errors",
)
"""Modules whose public names are documented, each on a page of its own. `strata` itself comes last: it mostly repeats."""
INTEGRATIONS = (
    "strata.integrations.lightning",
    "strata.integrations.huggingface",
    "strata.integrations.loading",
)
START_S = 60.0


def pages() -> dict[str, str]:
    return {
        "reference/cli.md": command_line(),
        "reference/http.md": http_api(openapi()),
        "reference/grpc.md": grpc_contract(),
        **python_faces(),
    }


# --- Python ---


def python_faces() -> dict[str, str]:
    found: dict[str, str] = {}
    homes: dict[int, tuple[str, str]] = {}
    for face in FACES:
        module = importlib.import_module(face)
        lines = [f"# {face}", "", first_paragraph(module), ""]
        for name in public_names(module):
            homes.setdefault(id(getattr(module, name)), (face, name))
            lines += [f"::: {face}.{name}", ""]
        found[f"reference/python/{face}.md"] = "\n".join(lines)
    found["reference/python/strata.md"] = top_level(homes)
    lines = ["# strata.integrations", "", "For trainers that have a loop of their own.", ""]
    for integration in INTEGRATIONS:
        module = importlib.import_module(integration)
        lines += [f"## {integration}", "", first_paragraph(module), ""]
        lines += [f"::: {integration}.{name}\n" for name in public_names(module)]
    found["reference/python/strata.integrations.md"] = "\n".join(lines)
    return found


def top_level(homes: dict[int, tuple[str, str]]) -> str:
    """`import strata`: most names are documented where they are at home; the rest stand here."""
    strata = importlib.import_module("strata")
    rows, own = [], []
    for name in sorted(strata.__all__):
        value = getattr(strata, name)
        if not callable(value):
            continue
        home = homes.get(id(value))
        if home is None:
            own.append(f"::: strata.{name}\n")
            rows.append(f"| [`{name}`][strata.{name}] | below |")
        else:
            rows.append(f"| [`{name}`][{home[0]}.{home[1]}] | [{home[0]}]({home[0]}.md) |")
    table = "\n".join(["| name | documented in |", "|---|---|", *rows])
    return (
        f"# strata\n\n{first_paragraph(strata)}\n\nEverything that most programs need is here.\n\n{table}\n\n"
        + "\n".join(own)
    )


def public_names(module: Any) -> list[str]:
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
            if inspect.isclass(value) or inspect.isfunction(value)
        ]
    return sorted(names, key=str.lower)


def first_paragraph(module: Any) -> str:
    return " ".join((inspect.getdoc(module) or "").split("\n\n")[0].split())


# --- the command line ---


def command_line() -> str:
    import typer

    from strata.cli.main import app

    command: Any = typer.main.get_command(app)
    parts = [
        "# Command line",
        "",
        "Made from the commands themselves: `strata COMMAND --help` says the same. Listings take `--json`; commands that ask",
        "a coordinator take `--api` (`STRATA_API_URL`) and `STRATA_TOKEN`.",
        "",
        "| exit status | meaning |",
        "|---|---|",
        "| 0 | done, or the answer is yes |",
        "| 1 | the answer is no: something is wrong that was asked about |",
        "| 2 | the call itself was wrong |",
        "| 3 | the coordinator cannot be reached |",
        "| 130 | interrupted |",
        "",
    ]
    for words, each in walk(command, ["strata"]):
        parts += described(words, each)
    return "\n".join(parts)


def walk(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    for name, each in command.commands.items():
        if hasattr(each, "commands"):
            yield from walk(each, [*words, name])
        elif not each.hidden:
            yield [*words, name], each


def described(words: list[str], command: Any) -> list[str]:
    context = command.context_class(command, info_name=" ".join(words))
    usage = " ".join([*words, *command.collect_usage_pieces(context)])
    lines = [f"## {' '.join(words)}", "", plain(command.help or ""), "", "```text", plain(usage), "```", ""]
    if words[-1] == "torchrun":
        lines += [
            "Every flag of `torchrun`; [what is different](../concepts/training.md#launching) without them.",
            "",
        ]
    rows = [row(parameter, context) for parameter in command.get_params(context) if parameter.name != "help"]
    if rows := [each for each in rows if each]:
        lines += ["| argument or option | default | meaning |", "|---|---|---|", *rows, ""]
    return lines


def row(parameter: Any, context: Any) -> str:
    if getattr(parameter, "hidden", False):
        return ""
    is_option = parameter.param_type_name == "option"
    name = (
        ", ".join([*parameter.opts, *parameter.secondary_opts])
        if is_option
        else parameter.metavar or parameter.name
    )
    kind = "" if not is_option or parameter.is_flag else f" {parameter.display_type(context)}"
    default = parameter.get_default(context, call=False)
    empty = default is None or callable(default) or default in ("", (), [], False)
    shown = "" if empty or parameter.required else f"`{default}`"
    about = plain(getattr(parameter, "help", None) or "")
    if not shown and (said := re.fullmatch(r"(.+) \[([^\[\]]+)\]", about, re.S)):
        about, shown = said[1], said[2]  # One that depends on something else, as its help says it.
    variable = parameter.envvar
    if variable:
        about += f" Environment: `{variable if isinstance(variable, str) else ', '.join(variable)}`."
    return f"| `{cell(plain(name) + kind)}`{' (required)' if parameter.required else ''} | {shown} | {cell(about)} |"


def plain(text: str) -> str:
    return re.sub(r"\\\[", "[", inspect.cleandoc(text))


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# --- HTTP ---


def openapi() -> dict[str, Any]:
    """Of a real coordinator, started for this and stopped again."""
    with tempfile.TemporaryDirectory(prefix="strata-docs-") as folder:
        command = [sys.executable, "-m", "strata.cli.main", "serve", "--data-dir", folder]
        command += ["--host", "127.0.0.1", "--grpc-port", "0", "--http-port", "0"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
        server = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**kept, "STRATA_LAUNCHER": "none"},
        )
        assert server.stdout is not None
        printed: list[str] = []
        try:
            for line in server.stdout:  # It ends the line below, or ends.
                printed.append(line)
                if "Ctrl-C stops" in line:
                    break
            else:
                raise RuntimeError("The coordinator did not start:\n" + "".join(printed))
            ports = json.loads((Path(folder) / "serving.json").read_text())
            with urllib.request.urlopen(
                f"http://127.0.0.1:{ports['http']}/openapi.json", timeout=START_S
            ) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        finally:
            server.terminate()
            server.communicate(timeout=START_S)


def http_api(schema: dict[str, Any]) -> str:
    lines = [
        "# HTTP API",
        "",
        "Made from the coordinator's own `/openapi.json`; `/docs` on a running one lets you try the calls. "
        "[Errors, limits and events](api.md) are the same for all of them.",
        "",
    ]
    used: dict[str, None] = {}
    for path, calls in schema["paths"].items():
        for method, call in calls.items():
            lines += [f"## {method.upper()} {path}", ""]
            about = call.get("description") or call.get("summary") or ""
            lines += [about, ""]
            rows = [
                f"| `{p['name']}` | {p['in']} | {kind(p.get('schema', {}), used)} | {cell(p.get('description') or p.get('schema', {}).get('description', ''))} |"
                for p in call.get("parameters", [])
            ]
            if rows:
                lines += ["| parameter | in | type | |", "|---|---|---|---|", *rows, ""]
            for content in call.get("requestBody", {}).get("content", {}).values():
                lines += [f"Body: {kind(content.get('schema', {}), used)}.", ""]
            for status, answer in call.get("responses", {}).items():
                if status.startswith("2"):
                    kinds = [
                        f"{kind(content.get('schema', {}), used)} (`{media}`)"
                        for media, content in answer.get("content", {}).items()
                    ]
                    lines += [f"Answers {status}: {', '.join(kinds) or 'nothing'}.", ""]
    schemas = schema.get("components", {}).get("schemas", {})
    lines += ["## Types", ""]
    done: set[str] = set()
    while todo := [name for name in used if name not in done]:
        for name in todo:
            done.add(name)
            about = schemas[name]
            lines += [f"### {name}", "", about.get("description", ""), ""]
            if "enum" in about:
                lines += ["One of " + ", ".join(f"`{value}`" for value in about["enum"]) + ".", ""]
            rows = [
                f"| `{key}`{'' if key in about.get('required', []) else ' (optional)'} | {kind(field, used)} | {cell(field.get('description', ''))} |"
                for key, field in about.get("properties", {}).items()
            ]
            if rows:
                lines += ["| field | type | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def kind(schema: dict[str, Any], used: dict[str, None]) -> str:
    """A JSON Schema in a few words; named types are links."""
    if reference := schema.get("$ref"):
        name = reference.rsplit("/", 1)[1]
        used.setdefault(name)
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(kind(each, used) for each in schema[key]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}), used)}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {kind(schema['additionalProperties'], used)}"
    return str(schema.get("type", "any"))


# --- gRPC ---

KINDS = {
    1: "double",
    2: "float",
    3: "int64",
    4: "uint64",
    5: "int32",
    8: "bool",
    9: "string",
    12: "bytes",
    13: "uint32",
    17: "sint32",
    18: "sint64",
}


def grpc_contract() -> str:
    """From the proto file: services first, then messages, each with the comments that stand beside it."""
    from google.protobuf import descriptor_pb2
    from grpc_tools import protoc  # type: ignore[import-untyped]

    source = ROOT / "proto/strata/rpc/coordinator.proto"
    with tempfile.TemporaryDirectory(prefix="strata-docs-") as folder:
        out = Path(folder) / "set"
        status = protoc.main(
            [
                "protoc",
                f"-I{source.parent}",
                "--include_source_info",
                f"--descriptor_set_out={out}",
                source.name,
            ]
        )
        if status != 0:
            raise RuntimeError(f"{source} cannot be compiled.")
        file = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]
    notes = {
        tuple(at.path): " ".join(f"{at.leading_comments} {at.trailing_comments}".split())
        for at in file.source_code_info.location
    }
    opening = [line.removeprefix("//").strip() for line in source.read_text().split("syntax")[0].splitlines()]
    package = (
        f"`proto/strata/rpc/coordinator.proto`, package `{file.package}`. In this release it is served as `coordinator` too: "
        "see [upgrading](../operating/upgrading.md)."
    )
    lines = ["# gRPC", "", *opening, "", package, ""]
    for number, service in enumerate(file.service):
        lines += [f"## Service {service.name}", "", "| call | request | answer | |", "|---|---|---|---|"]
        for index, method in enumerate(service.method):
            asked, answered = (
                f"{'stream of ' if streams else ''}{linked(name)}"
                for streams, name in (
                    (method.client_streaming, method.input_type),
                    (method.server_streaming, method.output_type),
                )
            )
            lines.append(
                f"| `{method.name}` | {asked} | {answered} | {cell(notes.get((6, number, 2, index), ''))} |"
            )
        lines.append("")
    lines += ["## Messages", ""]
    for number, message in enumerate(file.message_type):
        lines += of_message(message, (4, number), notes)
    for number, enum in enumerate(file.enum_type):
        lines += [f"### {enum.name}", "", notes.get((5, number), ""), ""]
        lines += [", ".join(f"`{value.name}` = {value.number}" for value in enum.value), ""]
    return "\n".join(lines)


def of_message(message: Any, path: tuple[int, ...], notes: dict[tuple[int, ...], str]) -> list[str]:
    maps = {each.name: each for each in message.nested_type if each.options.map_entry}
    lines = [f"### {message.name}", "", re.sub(r"-{3,}.*?-{3,}", "", notes.get(path, "")), ""]
    if message.field:
        lines += ["| field | number | type | |", "|---|---|---|---|"]
    for index, field in enumerate(message.field):
        entry = maps.get(field.type_name.rsplit(".", 1)[-1])
        if entry is not None:
            shown = f"map of {of_field(entry.field[0])} to {of_field(entry.field[1])}"
        else:
            shown = ("list of " if field.label == 3 else "") + of_field(field)
        if field.HasField("oneof_index") and not field.proto3_optional:
            shown += f" (one of `{message.oneof_decl[field.oneof_index].name}`)"
        lines.append(
            f"| `{field.name}` | {field.number} | {shown} | {cell(notes.get((*path, 2, index), ''))} |"
        )
    return [*lines, ""]


def of_field(field: Any) -> str:
    return linked(field.type_name) if field.type_name else KINDS[field.type]


def linked(name: str) -> str:
    short = name.rsplit(".", 1)[-1]
    return f"[{short}](#{short.lower()})"
