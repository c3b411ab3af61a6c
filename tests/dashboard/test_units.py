"""What can be checked without a browser: types, the reducer, formatting, forms, the simulation."""

from __future__ import annotations

import re

from tests.dashboard.browser import build_dashboard, npx
from tests.support import Coordinator


def test_types_agree() -> None:
    npx("tsc", "--noEmit")


def test_units() -> None:
    npx("vitest", "run", "--reporter=dot", "--pool=threads", "--maxWorkers=1")


def test_the_types_say_what_the_api_answers(watched: Coordinator) -> None:
    """What the page relies on is there. More may have come; `npm run types` brings it."""
    text = (build_dashboard.SOURCES / "src" / "api" / "schema.d.ts").read_text()
    inside = text.partition("    schemas: {\n")[2].partition("\n    };\n")[0]
    typed = {
        name: set(re.findall(r"^ {12}(\w+)\??:", body, re.MULTILINE))
        for name, body in re.findall(r"^ {8}(\w+): \{\n(.*?)^ {8}\};", inside, re.MULTILINE | re.DOTALL)
    }
    offered = {
        name: set(schema.get("properties", {}))
        for name, schema in watched.get("/openapi.json")["components"]["schemas"].items()
    }
    assert {"WorkerView", "ShardPlanView", "PreviewView", "DashboardView"} <= set(typed)
    gone = {name: fields - offered.get(name, set()) for name, fields in typed.items()}
    assert {name: fields for name, fields in gone.items() if fields} == {}, "run `npm run types`"
