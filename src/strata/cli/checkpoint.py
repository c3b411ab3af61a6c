"""`strata checkpoint`: what a folder or bucket holds, whether it is intact, copies in and out of other formats, and removal.

Exit status: 0 done, 1 the answer is no (damaged, refused), 2 the question could not be answered. With `--json` the
answer, or `{"error", "code", "hint"}`, is the only thing on stdout.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import quote

import typer

from strata.checkpoint.catalog.listing import Catalog, Entry, where
from strata.checkpoint.catalog.retention import LastGood, remove_chosen
from strata.checkpoint.errors import CheckpointNotFound, Damaged, LoadFailed
from strata.checkpoint.export import FORMATS, MAX_SHARD_BYTES, export, find
from strata.checkpoint.image.plain import plain_files
from strata.checkpoint.importing import DestinationTaken, adopt
from strata.checkpoint.locating import locate
from strata.checkpoint.verify import FILE, Verified, verify_file, verify_store
from strata.cli.common import (
    DEFAULT_API,
    Api,
    AsJson,
    LiteralGroup,
    ago,
    console,
    get_facts,
    get_rows,
    print_json,
    print_table,
    say_error,
    size,
)
from strata.errors import StrataError
from strata.stores import open_store
from strata.stores.protocol import Store

DONE, NO, NO_ANSWER = 0, 1, 2

app = typer.Typer(
    cls=LiteralGroup,
    name="checkpoint",
    help="List, verify, locate, import, export and remove checkpoints.",
    no_args_is_help=True,
)

Destination = Annotated[
    str,
    typer.Argument(
        metavar="DESTINATION",
        help="A folder, or a URL such as s3://bucket/prefix.",
        envvar=["STRATA_CHECKPOINTS", "CHECKPOINT_BUCKET", "CHECKPOINT_DIR"],
        show_default=False,
    ),
]
Step = Annotated[int | None, typer.Option("--step", min=0, help="Select the checkpoint of this step.")]
Id = Annotated[str | None, typer.Option("--id", help="Select the checkpoint with this id.")]
Memory = Annotated[str, typer.Option("--memory", help="Memory limit for buffers.")]
_MEMORY, _MAX_SHARD_SIZE = "512MB", f"{MAX_SHARD_BYTES // 10**9}GB"


@app.command("ls")
def ls(destination: Destination, json: AsJson = False) -> None:
    """List the checkpoints, newest first, and files that have no manifest."""
    with _answering(json):
        store = _opened(destination)
        listing = Catalog(store).list()
        rows = [_row(store, entry) for entry in listing.entries]
        rows += [_file_row(store, blob.key, blob.size_bytes, blob.modified_s) for blob in plain_files(store)]
        if json:
            print_json({"checkpoints": rows, "problems": list(listing.problems)})
            return
        table = [
            (
                "-" if row["step"] is None else row["step"],
                row["path"].rpartition("/")[2],
                row["format"],
                size(row["size_bytes"]),
                "-" if row["world_size"] is None else row["world_size"],
                ago(row["created_at"]),
            )
            for row in rows
        ]
        columns = (">STEP", "=FILE", "FORMAT", ">SIZE", ">WORLD", ">CREATED")
        print_table(columns, table, empty=f"There are no checkpoints in {destination}.")
        for problem in listing.problems:
            say_error(StrataError(problem))


@app.command("verify")
def verify(destination: Destination, step: Step = None, id: Id = None, json: AsJson = False) -> None:
    """Verify checksums, and name each damaged tensor."""
    with _answering(json):
        results = []
        for verified in _verified(destination, step, id):
            results.append(verified)
            if not json:
                _print_verified(verified)
        is_intact = all(verified.is_intact for verified in results)
        if json:
            checkpoints = [{**asdict(each), **_verdict(each.is_intact)} for each in results]
            print_json({**_verdict(is_intact), "checkpoints": checkpoints})
        elif not results:
            console.print(f"There are no checkpoints in {destination}.", markup=False, style="dim")
    raise typer.Exit(DONE if is_intact else NO)


@app.command("where")
def where_command(
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="Step to look up.", show_default=False)],
    destination: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DESTINATION",
            help="The run's checkpoint destinations, nearest first; without any, the coordinator is asked.",
            envvar=["STRATA_CHECKPOINTS"],
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", help="Name of the job, if the coordinator knows several."),
    ] = None,
    verify_bytes: Annotated[
        bool, typer.Option("--verify", help="Also verify the checksums of copies that this machine can read.")
    ] = False,
    api: Api = DEFAULT_API,
    json: AsJson = False,
) -> None:
    """Show where the copies of a step are, which failures it survives, and what would be lost now.

    Copies are looked up in this machine's memory, its peers' memory and the destinations, or in what the run has
    reported to its coordinator.
    """
    with _answering(json):
        if destination and run is None:
            for each in destination:
                _check_there(each)
            found = asdict(locate([open_store(each) for each in destination], step=step, verify=verify_bytes))
        else:
            found = get_facts(
                api, f"/api/jobs/{quote(_job(api, run), safe='')}/safety?step={step}", having="copies"
            )
        if json:
            print_json(found)
        else:
            _print_where(found, step)
    raise typer.Exit(DONE if found["copies"] else NO)


def _job(api: str, run: str | None) -> str:
    """The one that was asked for, or the only one there is."""
    if run is not None:
        return run
    jobs = sorted({str(row["job_id"]) for row in get_rows(api, "/api/checkpoints")})
    if len(jobs) != 1:
        known = ", ".join(jobs) or "none (no job has saved a checkpoint)"
        raise StrataError(
            f"Which run? Known: {known}.",
            hint="strata checkpoint where STEP --run RUN, or strata checkpoint where STEP DESTINATION.",
        )
    return jobs[0]


def _print_where(found: dict[str, Any], step: int) -> None:
    rows = [
        (
            each["kind"],
            each["host"] or "-",
            each["part"] or "complete",
            {True: "verified", False: "DAMAGED", None: "not verified"}[each["verified"]],
            each["where"] or "-",
        )
        for each in found["copies"]
    ]
    print_table(
        ("COPY", "HOST", "PART", "BYTES", "=WHERE"), rows, empty=f"No copy of step {step:,} was found."
    )
    for problem in found["problems"]:
        say_error(StrataError(f"Unknown: {problem}"))
    if rows:
        safe = ", ".join(f"a {domain}" if domain != "site" else "the site" for domain in found["safe_in"])
        console.print(f"step {step:,} survives the loss of {safe or 'nothing'}", markup=False)
    console.print(f"if it happened now, at step {found['reached']:,}:", markup=False)
    for loss in found["losses"]:
        console.print(f"  {loss['label'] + ':':<14} {_lost(loss)}", markup=False)


def _lost(loss: dict[str, Any]) -> str:
    if loss["from_step"] is None:
        return str(loss["text"])
    return f"{loss['text']} lost, training continues at step {loss['from_step']:,}"


@app.command("export")
def export_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A folder or URL with checkpoints, or one .pt file.", show_default=False
        ),
    ],
    to: Annotated[
        str,
        typer.Argument(
            metavar="TO", help="What to write: a file, a folder for hf and dcp, or a URL.", show_default=False
        ),
    ],
    format: Annotated[
        str | None, typer.Option("--format", "-f", help=f"{', '.join(FORMATS)}. [from the suffix of TO]")
    ] = None,
    step: Step = None,
    id: Id = None,
    key: Annotated[
        str | None, typer.Option("--key", "-k", help="Only this part of the state, such as model.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="For hf: maximum size of one file, such as 500MB.")
    ] = _MAX_SHARD_SIZE,
    memory: Memory = _MEMORY,
    force: Annotated[bool, typer.Option("--force", help="Overwrite TO if it exists.")] = False,
    trusted_source: Annotated[
        bool, typer.Option("--trusted-source", help="Allow code in the checkpoint to run while it is loaded.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Write a copy that other tools read: .pt, safetensors, a Hugging Face or a DCP folder.

    Tensors are copied one by one, without GPUs: a model of any size needs no more memory than --memory. hf writes only the
    model's weights, as sharded safetensors with an index.
    """
    with _answering(json):
        _check_there(source)
        made = export(
            source,
            to,
            format=format,
            step=step,
            checkpoint_id=id,
            key=key,
            overwrite=force,
            trusted_source=trusted_source,
            max_shard_bytes=_bytes_of(max_shard_size, "--max-shard-size"),
            memory_bytes=_bytes_of(memory, "--memory"),
        )
        if json:
            print_json(asdict(made))
            return
        console.print(
            f"wrote {made.path}: {made.tensors} tensors, {size(made.size_bytes)}, as {made.format}",
            markup=False,
        )
        if made.left_out:
            console.print(
                f"omitted, because {made.format} cannot hold it: {', '.join(made.left_out)}", markup=False
            )


@app.command("import")
def import_command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A .pt or .safetensors file, a Hugging Face folder, or a folder written by dcp.save.",
            show_default=False,
        ),
    ],
    to: Annotated[
        str,
        typer.Argument(
            metavar="DEST", help="The folder or URL where the run keeps its checkpoints.", show_default=False
        ),
    ],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Step to record. [from the file, else 0]")
    ] = None,
    memory: Memory = _MEMORY,
    json: AsJson = False,
) -> None:
    """Import a model from another tool as the first checkpoint of a run.

    A job started with DEST continues from it at any world size; with weights alone, it starts with a fresh optimizer.
    """
    with _answering(json):
        made = adopt(path, to, step=step, memory_bytes=_bytes_of(memory, "--memory"))
        if json:
            print_json(asdict(made))
            return
        console.print(
            f"imported {path} ({made.format}) as step {made.step:,} into {made.path}: {made.tensors} tensors, "
            f"{size(made.size_bytes)}",
            markup=False,
        )
        for note in made.notes:
            console.print(f"  {note}", markup=False)
        if made.left_out:
            console.print(f"  left out: {', '.join(made.left_out)}", markup=False)


@app.command("rm")
def rm(
    destination: Destination,
    chosen: Annotated[
        list[str] | None,
        typer.Argument(metavar="STEP|ID|FILE", help="Steps, ids or file names.", show_default=False),
    ] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option("--step", min=0, help="Remove the checkpoint of this step; may be repeated."),
    ] = None,
    ids: Annotated[
        list[str] | None, typer.Option("--id", help="Remove the checkpoint with this id; may be repeated.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Remove even if no intact checkpoint would be left.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Remove checkpoints; the last intact one only with --force."""
    with _answering(json):
        named = [*(chosen or []), *map(str, steps or []), *(ids or [])]
        if not named:
            raise StrataError(
                "No checkpoint was named.",
                hint=f"Name steps or ids: strata checkpoint rm {destination} --step 400. `strata checkpoint ls` shows them.",
            )
        removed = remove_chosen(_opened(destination), named, force=force)
        if json:
            print_json({"removed": [asdict(each) for each in removed]})
            return
        for each in removed:
            step = "" if each.step is None else f"step {each.step}, "
            console.print(f"removed {each.name} ({step}{size(each.size_bytes)})", markup=False)


@contextmanager
def _answering(as_json: bool) -> Iterator[None]:
    """What goes wrong is a sentence and a status, never a traceback."""
    try:
        yield
    except (StrataError, OSError, ValueError) as error:
        shown = error if isinstance(error, StrataError) else StrataError(str(error))
        if as_json:
            print_json({"error": shown.message, "code": shown.code, "hint": shown.hint})
        else:
            say_error(shown)
        raise typer.Exit(_status(error)) from None


def _status(error: Exception) -> int:
    if isinstance(error, CheckpointNotFound):
        return NO_ANSWER
    return NO if isinstance(error, LastGood | Damaged | LoadFailed | DestinationTaken) else NO_ANSWER


def _bytes_of(text: str, option: str) -> int:
    """A size as people write it: 5GB, 512MiB, 1000000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    power = "KMGT".find(found[2].upper()) + 1 if found and found[2] else 0
    count = int(float(found[1]) * (1024 if found[3] else 1000) ** power) if found else 0
    if not count:
        raise StrataError(f"{option}: '{text}' is not a size.", hint="Write 512MB, or 5GB.")
    return count


def _opened(destination: str) -> Store:
    _check_there(destination)
    return open_store(destination)


def _check_there(destination: str) -> None:
    """A folder that does not exist is a mistake, not an empty one."""
    path = destination.removeprefix("file://")
    if "://" not in path and not os.path.exists(path):
        raise StrataError(
            f"'{destination}' does not exist.", hint="Pass the folder or URL that holds the checkpoints."
        )


def _verified(destination: str, step: int | None, id: str | None) -> Iterator[Verified]:
    _check_there(destination)
    if destination.endswith(".pt") or step is not None or id is not None:
        store, found = find(destination, step=step, checkpoint_id=id)
        if isinstance(found, str):
            blob = store.stat(found)
            assert blob is not None
            yield verify_file(store, blob)
        else:
            yield from verify_store(store, [found])
        return
    yield from verify_store(open_store(destination))


def _verdict(is_intact: bool) -> dict[str, bool]:
    """`is_whole` is the field's deprecated name."""
    return {"is_intact": is_intact, "is_whole": is_intact}


def _print_verified(verified: Verified) -> None:
    step = "" if verified.step is None else f"step {verified.step}, "
    verdict = "intact" if verified.is_intact else "DAMAGED"
    note = f" ({verified.note})" if verified.note else ""
    console.print(f"{verdict}: {verified.name} ({step}{size(verified.size_bytes)}){note}", markup=False)
    for damage in verified.damages:
        console.print(f"  {damage}", markup=False)


def _row(store: Store, entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "id": manifest.checkpoint_id,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "format": manifest.format,
        "size_bytes": manifest.size_bytes,
        "parts": len(manifest.parts),
        "tensors": len(manifest.tensors),
        "digest": manifest.digest,
        "created_at": manifest.created_at,
        "world_size": manifest.world_size,
        "generation": manifest.generation,
        "author": manifest.author,
        "tier": store.tier,
        "path": where(store, manifest.parts[0].key if len(manifest.parts) == 1 else entry.key),
    }


def _file_row(store: Store, key: str, size_bytes: int, modified_s: float) -> dict[str, Any]:
    """The same facts of a file without a manifest, as far as they are known."""
    return {
        "id": key,
        "step": None,
        "epoch": None,
        "format": FILE,
        "size_bytes": size_bytes,
        "parts": 1,
        "tensors": None,
        "digest": None,
        "created_at": modified_s,
        "world_size": None,
        "generation": None,
        "author": None,
        "tier": store.tier,
        "path": where(store, key),
    }
