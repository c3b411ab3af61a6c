"""Build a token index, from Python or from the command line:

    python -m elastic_harness.data.index_builder --data-files data/train.jsonl --tokenizer gpt2 --output data/train.index

Writes the index, one memory-mapped file under exactly the name given to --output, and beside it a note
`<stem>.json` with the files and the number of tokens. While it works there is a folder `<output>.partial`;
after a crash the same command continues from it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Sequence

from strata.data.tokens.building.builder import BuildOptions, BuildReport, Progress, build_index
from strata.data.tokens.building.progress import TerminalProgress
from strata.data.tokens.building.records import OnBad
from strata.data.tokens.format import DEFAULT_ENTRY_INTERVAL, IndexEntry, IndexHeader
from strata.data.tokens.index import TokenIndex as TokenIndexFile
from strata.errors import StrataError
from strata.logs import level
from strata.trainer.error_translation import reading_data
from strata.trainer.errors import DataLoadingError

COMMAND = "python -m elastic_harness.data.index_builder --data-files"

__all__ = ["IndexBuilder", "IndexEntry", "IndexHeader", "TokenIndexFile", "main"]


class IndexBuilder:
    """Tokenizes text files into one index.

    `tokenizer` is any object with `encode(str) -> list[int]`, the path of a `tokenizer.json`, a name known to
    the tokenizers library, or "bytes". `eos` is a token, or its id, to put after each document. Bad records
    raise `DataLoadingError` with file and line, or are skipped and counted with `on_bad="skip"`.
    """

    def __init__(
        self,
        tokenizer: object,
        entry_interval: int = DEFAULT_ENTRY_INTERVAL,
        *,
        text_key: str = "text",
        eos: str | int | None = None,
        on_bad: OnBad = "raise",
        workers: int | None = None,
        force: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.options = BuildOptions(
            entry_interval=entry_interval,
            text_key=text_key,
            eos=eos,
            on_bad=on_bad,
            workers=workers,
            force=force,
        )
        self.progress = progress
        self.report: BuildReport | None = None
        """Of the last build: how long it took, what was skipped."""

    def build(
        self, files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], path: str | os.PathLike[str]
    ) -> IndexHeader:
        """Build the index of `files` at `path`. Returns at once if an up-to-date one exists."""
        names = [files] if isinstance(files, str | os.PathLike) else list(files)
        with reading_data(index_command=COMMAND):
            self.report = build_index(
                names, path, tokenizer=self.tokenizer, options=self.options, progress=self.progress
            )
        return self.report.header


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit status: 0 built or up to date, 1 the data or the tokenizer are at fault, 2 usage."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    files = [*arguments.files, *arguments.data_files]
    if not files:
        parser.error("no data files: give --data-files FILE…")
    try:
        logging.basicConfig(level=level(logging.WARNING), format="%(message)s")
        with TerminalProgress() as progress:
            builder = IndexBuilder(
                arguments.tokenizer,
                arguments.entry_interval,
                text_key=arguments.text_key,
                eos=arguments.eos,
                on_bad=arguments.on_bad,
                workers=arguments.workers,
                force=arguments.force,
                progress=progress,
            )
            builder.build(files, arguments.output)
    except ValueError as error:
        parser.error(str(error))
    except StrataError as error:
        kind = f"{type(error).__name__}: " if isinstance(error, DataLoadingError) else "error: "
        print(f"{kind}{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. The same command continues where it stopped.", file=sys.stderr)
        return 130
    assert builder.report is not None
    print("\n".join(builder.report.lines()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m elastic_harness.data.index_builder",
        description="Tokenize JSONL, plain text or parquet files (gzipped too) into a memory-mapped index.",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="data files, or globs in quotes")
    parser.add_argument("--data-files", nargs="+", default=[], metavar="FILE", help="the same, as an option")
    parser.add_argument("-o", "--output", required=True, metavar="INDEX", help="where to write the index")
    parser.add_argument(
        "-t",
        "--tokenizer",
        default="bytes",
        help="path of a tokenizer.json, a name on the hub, or 'bytes', the built-in one (default)",
    )
    parser.add_argument(
        "--text-key", default="text", help="field or column that holds the text (default: text)"
    )
    parser.add_argument("--eos", metavar="TOKEN", help="token, or its id, to put after each document")
    parser.add_argument("--workers", type=int, help="processes (default: one per core)")
    parser.add_argument(
        "--on-bad",
        choices=("raise", "skip"),
        default="raise",
        help="what to do with bad records (default: raise)",
    )
    parser.add_argument(
        "--entry-interval",
        type=int,
        default=DEFAULT_ENTRY_INTERVAL,
        metavar="TOKENS",
        help=f"tokens between index entries (default: {DEFAULT_ENTRY_INTERVAL})",
    )
    parser.add_argument("--force", action="store_true", help="build even if an up-to-date index exists")
    return parser


if __name__ == "__main__":
    sys.exit(main())
