"""`strata validate`: everything that is wrong with a training configuration, before anything starts.

Exit status: 0 it can be used, 1 it cannot, 2 there is no such file, or it cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from strata.cli.common import AsJson, console, print_json
from strata.core.text import counted
from strata.environment import unread
from strata.errors import MissingDependency, StrataError

VALID, INVALID, UNREADABLE = 0, 1, 2
LARGEST_FILE_BYTES = 10 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One line of the report. `line` counts from 1; 0 is the whole file, or a setting from the command line."""

    severity: Literal["error", "warning"]
    line: int
    path: str
    message: str
    hint: str = ""


def validate(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The configuration, a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that replace those of the file: training.lr=1e-4"),
    ] = None,
    s3: Annotated[bool, typer.Option("--s3", help="Also check access to the S3 bucket it names.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a training configuration: syntax, names, types, ranges, and whether settings fit together."""
    try:
        text = _read(Path(config))
    except StrataError as error:
        _report(
            config,
            [Problem(severity="error", line=0, path="", message=error.message, hint=error.hint)],
            as_json,
        )
        raise typer.Exit(UNREADABLE) from None
    problems = list(find_problems(text, overrides or [], try_s3=s3))
    usable = not any(problem.severity == "error" or strict for problem in problems)
    _report(config, problems, as_json, usable=usable)
    raise typer.Exit(VALID if usable else INVALID)


def find_problems(text: str, overrides: list[str], *, try_s3: bool = False) -> Iterator[Problem]:
    """Syntax first; only a file that can be read as YAML is looked at as a configuration."""
    import yaml

    from strata.trainer.validation import validate_index, validate_training_config

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        yield explain_syntax(text, error)
        return
    except RecursionError:
        yield Problem(severity="error", line=0, path="", message="The file is nested too deeply")
        return
    except yaml.YAMLError as error:
        yield Problem(severity="error", line=0, path="", message=f"This is not YAML: {error}")
        return
    if root is None:
        yield Problem(
            severity="error",
            line=0,
            path="",
            message="The file is empty",
            hint="See examples/configs/small.yaml",
        )
        return
    if not isinstance(root, yaml.MappingNode):
        yield Problem(
            severity="error",
            line=1,
            path="",
            message="The file must hold sections (training:, data:, ...) at its top",
        )
        return
    lines: dict[str, int] = {}
    repeated = list(_walk(root, "", lines))
    if repeated:
        yield from repeated
        return
    try:
        settings = _settings(text, overrides)
    except yaml.MarkedYAMLError as error:
        yield explain_syntax(text, error)
        return
    except StrataError as error:
        yield Problem(severity="error", line=0, path="", message=error.message, hint=error.hint)
        return
    result = validate_training_config(settings, validate_s3=try_s3)
    errors, warnings = result.errors, result.warnings
    if result.valid:
        index = validate_index(settings)
        errors, warnings = index.errors, warnings + index.warnings
    for severity, findings in (("error", errors), ("warning", warnings)):
        for finding in findings:
            yield Problem(
                severity=severity,  # type: ignore[arg-type]
                line=lines.get(finding.path, 0),
                path=finding.path,
                message=finding.problem,
                hint=_missing_space(settings, finding.path),
            )
    for sentence in unread():
        yield Problem(severity="warning", line=0, path="", message=sentence)


_HINTS = {
    "constructor for the tag": "Tags (!name) are not understood here. Write the value without one.",
    "recursive": "A list or section cannot contain itself (*name inside &name).",
    "unhashable key": "A key must be a name: section.key: value.",
    "for merging": "`<<:` takes a section from elsewhere in the file: <<: *name",
}


def explain_syntax(text: str, error: Any) -> Problem:
    """The line, what the parser saw there, and what people usually did."""
    mark = error.problem_mark or error.context_mark
    number = 0 if mark is None else mark.line + 1
    rows = text.splitlines()
    row = rows[number - 1] if 0 < number <= len(rows) else ""
    before = next(
        (r for r in reversed(rows[: max(0, number - 1)]) if r.strip() and not r.strip().startswith("#")), ""
    )
    if "\t" in row[: len(row) - len(row.lstrip())] or "\\t" in (error.problem or ""):
        hint = "This line is indented with a tab. YAML allows only spaces."
    elif glued := re.match(r"\s*([\w.-]+):(\S+)\s*$", before):
        hint = f"Line {number - 1} has no space after its colon. Write '{glued[1]}: {glued[2]}'."
        number -= 1
    elif "mapping values are not allowed" in (error.problem or ""):
        hint = "A value that contains ': ' needs quotes, for example rdzv_id: \"my-job: 123\"; or the indentation is off."
    elif known := next((hint for words, hint in _HINTS.items() if words in f"{error.problem} {error}"), ""):
        hint = known
    elif "end of stream" in (error.problem or "") or "flow" in (error.context or ""):
        hint = "A quote, [ or { that was opened before this line is never closed."
    else:
        hint = "Check the indentation of this line and the one before it, and quote values with special characters."
    return Problem(
        severity="error", line=number, path="", message=f"YAML syntax: {error.problem or error}", hint=hint
    )


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise StrataError(f"{path} is too large for a configuration.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StrataError(
            f"Cannot read {path}: {error.strerror}.", hint="See examples/configs for examples."
        ) from None
    except UnicodeDecodeError:
        raise StrataError(f"{path} is not UTF-8 text.", hint="Is it a YAML file?") from None


def _settings(text: str, overrides: list[str]) -> Any:
    """The values as training will see them: OmegaConf reads `1e-4` as a number and resolves interpolations."""
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError:
        raise MissingDependency("omegaconf", extra="harness", feature="Reading configurations") from None
    try:
        wrong = [override for override in overrides if "=" not in override]
        if wrong:
            raise StrataError(f"'{wrong[0]}' is not a setting.", hint="Write section.key=value.")
        loaded: Any = OmegaConf.create(text)
        if overrides:
            loaded = OmegaConf.merge(loaded, OmegaConf.from_dotlist(overrides))
        return OmegaConf.to_container(loaded, resolve=True)
    except OmegaConfBaseException as error:
        raise StrataError(str(error).splitlines()[0], hint="Check the ${...} parts of the file.") from None
    except (ValueError, TypeError, AssertionError, RecursionError) as error:
        raise StrataError(
            f"The file cannot be read as settings: {str(error) or type(error).__name__}"
        ) from None


def _walk(node: Any, path: str, lines: dict[str, int], above: tuple[Any, ...] = ()) -> Iterator[Problem]:
    """Note where each key stands; a key that stands twice is a mistake that YAML readers hide."""
    import yaml

    if not isinstance(node, yaml.MappingNode) or any(node is each for each in above):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        name = str(key.value)
        here = f"{path}.{name}" if path else name
        if name in seen:
            yield Problem(
                severity="error",
                line=line,
                path=here,
                message=f"{name} is given twice; the first is on line {seen[name]}",
                hint="Keep one of them.",
            )
        seen[name] = lines[here] = line
        yield from _walk(value, here, lines, (*above, node))


def _missing_space(settings: Any, path: str) -> str:
    """`lr:1e-4` is valid YAML, a text, and never what was meant."""
    value = settings.get(path) if isinstance(settings, dict) else settings
    glued = re.match(r"([\w.-]+):(\S+)", value) if isinstance(value, str) else None
    return f"There is no space after the colon: write '{glued[1]}: {glued[2]}'." if glued else ""


def _report(config: str, problems: list[Problem], as_json: bool, *, usable: bool = False) -> None:
    if as_json:
        print_json({"valid": usable, "config": config, "problems": [asdict(problem) for problem in problems]})
        return
    for problem in problems:
        style = "bold red" if problem.severity == "error" else "yellow"
        where = f"{config}:{problem.line}: " if problem.line else f"{config}: "
        what = f"{problem.path}: {problem.message}" if problem.path else problem.message
        console.print(Text.assemble(where, (f"{problem.severity}: ", style), what), soft_wrap=True)
        if problem.hint:
            console.print(Text(f"    {problem.hint}"), soft_wrap=True)
    counts = {kind: sum(problem.severity == kind for problem in problems) for kind in ("error", "warning")}
    verdict = "can be used" if usable else "cannot be used"
    said = ", ".join(counted(number, kind) for kind, number in counts.items() if number)
    console.print(Text(f"{config} {verdict}" + (f": {said}" if said else "")), soft_wrap=True)
