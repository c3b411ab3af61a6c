"""Writes the types of the HTTP API and of the event stream, from the coordinator's own OpenAPI document.

    python scripts/generate_types.py            write them
    python scripts/generate_types.py --check    only say whether they are current; exit status 1 if not

`dashboard/src/api/generated.ts` holds every type the dashboard reads or sends, `src/strata/api_types.py` those that
`strata.Client` returns; `docs/reference/events.schema.json` is the JSON Schema of an event, for readers in any language. All are
committed, and a test fails when they are stale.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from strata.coordinator.auth.audit_log import AuditLog
from strata.coordinator.auth.gatekeeper import AccessRules, Gatekeeper
from strata.coordinator.auth.tokens import TaskTokens, TokenStore
from strata.coordinator.http.app import create_app
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.coordinator.logs.store import LogStore
from strata.coordinator.runtime import Runtime
from strata.core.cluster import Limits

ROOT = Path(__file__).resolve().parent.parent
TYPESCRIPT = ROOT / "dashboard" / "src" / "api" / "generated.ts"
PYTHON = ROOT / "src" / "strata" / "api_types.py"
EVENTS_SCHEMA = ROOT / "docs" / "reference" / "events.schema.json"
EVENT = "StreamEvent"
REFERENCE = "#/components/schemas/"
CLIENT = ("TaskView", "TaskAnswer", "LogView", "RecipeBody")

Schema = dict[str, Any]


class Spelling(NamedTuple):
    """How a language writes types."""

    plain: dict[str, str]
    unknown: str
    literals: Callable[[list[Any]], str]
    array: Callable[[str], str]
    record: Callable[[str], str]


IN_TYPESCRIPT = Spelling(
    plain={"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"},
    unknown="unknown",
    literals=lambda values: " | ".join(map(json.dumps, values)),
    array=lambda items: f"({items})[]" if " | " in items else f"{items}[]",
    record=lambda values: f"Record<string, {values}>",
)
IN_PYTHON = Spelling(
    plain={"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"},
    unknown="Any",
    literals=lambda values: f"Literal[{', '.join(map(json.dumps, values))}]",
    array=lambda items: f"list[{items}]",
    record=lambda values: f"dict[str, {values}]",
)


def openapi() -> Schema:
    async def ask(folder: str) -> Schema:
        runtime = Runtime.create(SqliteJournal(Path(folder)), Limits(), LogStore())
        gatekeeper = Gatekeeper(
            AccessRules(trust_loopback=True),
            tokens=TokenStore(Path(folder)),
            task_tokens=TaskTokens(Path(folder)),
            is_live=lambda task_id: False,
        )
        transport = httpx.ASGITransport(create_app(runtime, gatekeeper, AuditLog(Path(folder))))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.get("/openapi.json")
        document: Schema = answer.raise_for_status().json()
        return document

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(ask(folder))


def generate(document: Schema) -> dict[Path, str]:
    """What belongs in each file."""
    schemas: dict[str, Schema] = document["components"]["schemas"]
    requests = {name for path in document["paths"].values() for name in _requests(path, schemas)}
    header = "/** Types of the HTTP API and of the event stream. Generated: `npm run types`. Times are Unix seconds. */\n"
    parts = [_declaration(name, schema, name in requests) for name, schema in sorted(schemas.items())]
    kinds = ", ".join(f'"{kind}"' for kind in schemas[EVENT]["discriminator"]["mapping"])
    parts.append(
        f'/** Every kind on the stream. */\nexport const EVENT_KINDS: readonly {EVENT}["event"][] = [{kinds}];'
    )
    return {
        TYPESCRIPT: header + "\n" + "\n\n".join(parts) + "\n",
        PYTHON: _python(schemas),
        EVENTS_SCHEMA: json.dumps(_events_schema(schemas), indent=2, ensure_ascii=False) + "\n",
    }


def _requests(path: Schema, schemas: dict[str, Schema]) -> set[str]:
    return set().union(*(_used(operation.get("requestBody", {}), schemas) for operation in path.values()))


def _used(part: Any, schemas: dict[str, Schema]) -> set[str]:
    """Names of the schemas that a part of the document refers to, and those that these refer to."""
    names = {each.removeprefix(REFERENCE) for each in _references(part)}
    return names.union(*(_used(schemas[name], schemas) for name in names))


def _references(part: Any) -> set[str]:
    if isinstance(part, list):
        return set().union(*map(_references, part))
    if not isinstance(part, dict):
        return set()
    found = set().union(*map(_references, part.values()))
    return found | {part["$ref"]} if "$ref" in part else found


# --- TypeScript ---------------------------------------------------------------------------------------------


def _declaration(name: str, schema: Schema, is_request: bool) -> str:
    comment = _comment(schema, "")
    if "properties" not in schema:
        return f"{comment}export type {name} = {_type(schema, IN_TYPESCRIPT)};"
    # Answers are complete: a default is for those who send.
    optional = schema["properties"].keys() - schema.get("required", ()) if is_request else set()
    lines = [
        f"{_comment(member, '  ')}  {key}{'?' if key in optional else ''}: {_type(member, IN_TYPESCRIPT)};"
        for key, member in schema["properties"].items()
    ]
    return f"{comment}export interface {name} {{\n" + "\n".join(lines) + "\n}"


def _comment(schema: Schema, indent: str) -> str:
    return f"{indent}/** {' '.join(schema['description'].split())} */\n" if "description" in schema else ""


# --- Python -------------------------------------------------------------------------------------------------


def _python(schemas: dict[str, Schema]) -> str:
    used = _used([{"$ref": REFERENCE + name} for name in CLIENT], schemas)
    header = '''"""What the HTTP API answers `strata.Client`, as JSON. Generated: `npm run types`. Times are Unix seconds."""

from typing import Any, Literal, TypedDict
'''
    return header + "".join(_typed_dict(name, schemas[name]) for name in sorted(used))


def _typed_dict(name: str, schema: Schema) -> str:
    members = "".join(
        f"    {key}: {_type(member, IN_PYTHON)}\n" + _docstring(member)
        for key, member in schema["properties"].items()
    )
    about = f"{_docstring(schema)}\n" if "description" in schema else ""
    return f"\n\nclass {name}(TypedDict):\n{about}{members}"


def _docstring(schema: Schema) -> str:
    return f'    """{" ".join(schema["description"].split())}"""\n' if "description" in schema else ""


# --- types, in either language ------------------------------------------------------------------------------


def _type(schema: Schema, spelling: Spelling) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].removeprefix(REFERENCE))
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " | ".join(dict.fromkeys(_type(each, spelling) for each in schema[union]))
    if "const" in schema:
        return spelling.literals([schema["const"]])
    if "enum" in schema:
        return spelling.literals(schema["enum"])
    if schema.get("type") == "array":
        return spelling.array(_type(schema["items"], spelling) if schema.get("items") else spelling.unknown)
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return spelling.record(_type(values, spelling) if isinstance(values, dict) else spelling.unknown)
    return spelling.plain[schema["type"]] if "type" in schema else spelling.unknown


# --- JSON Schema --------------------------------------------------------------------------------------------


def _events_schema(schemas: dict[str, Schema]) -> Schema:
    used = sorted(_used(schemas[EVENT], schemas))
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schemas[EVENT],
        "$defs": {name: schemas[name] for name in used},
    }
    moved: Schema = _untitled(json.loads(json.dumps(whole).replace(REFERENCE, "#/$defs/")))
    return moved


def _untitled(part: Any) -> Any:
    """Without the titles that only repeat a name."""
    if isinstance(part, list):
        return [_untitled(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        key: _untitled(value) for key, value in part.items() if key != "title" or not isinstance(value, str)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    check = parser.parse_args().check
    stale = [
        (path, text)
        for path, text in generate(openapi()).items()
        if not path.exists() or path.read_text() != text
    ]
    for path, text in stale:
        print(f"{path.relative_to(ROOT)} {'is stale: run `npm run types`' if check else 'written'}")
        if not check:
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
