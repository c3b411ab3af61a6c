"""The committed history of a run, read from where its checkpoints are kept, and audited.

    report = strata.audit("s3://bucket/run-7", "imagenet")
    assert report.exact, report.reason

Reads manifests only, never a payload, and changes nothing. A manifest that cannot be read is left out and
logged: its child's record vouches for what it held.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from strata.core.data.audit import AuditReport, Commit, audit_all
from strata.core.data.audit import audit as audit_commits
from strata.core.data.ledger import DataCommit, LedgerError
from strata.core.data.mixture_changes import Board, MixtureView, Request, mixture_view
from strata.core.data.source_audit import SourceReport, by_source

log = logging.getLogger("strata.data")

Source = str | os.PathLike[str] | Iterable[Commit]
"""A checkpoint directory or URL, or the commits themselves, in the order they were made."""


def audit(source: Source, dataset: str, epoch: int | None = None, *, total: int | None = None) -> AuditReport:
    """Whether every sample of an epoch was trained exactly once. Without `epoch`: the newest one."""
    commits = commits_of(source)
    if epoch is None:
        return audit_all(commits, dataset)[-1]
    return audit_commits(commits, dataset, epoch, total=total)


def audit_epochs(source: Source, dataset: str) -> list[AuditReport]:
    """A report for each epoch of the dataset that the history knows, oldest first."""
    return audit_all(commits_of(source), dataset)


def audit_by_source(source: Source, dataset: str | None = None) -> list[SourceReport]:
    """What was trained of each source of a mixture, and whether exactly once within each epoch of the source. Raises
    `LedgerError` where the history knows no such mixture. Whether the mixture itself is exact is what `audit` says."""
    from strata.data.composing.mixture import plan_of

    commits = commits_of(source)
    mixtures = _mixtures(commits)
    name = dataset if dataset is not None or len(mixtures) != 1 else next(iter(mixtures))
    if name is None or name not in mixtures:
        raise LedgerError(
            f"The history has no mixture '{name}'." if name else "Which mixture?",
            hint=f"It has {', '.join(map(repr, sorted(mixtures)))}."
            if mixtures
            else "Its data is not a mixture: audit it without --by-source.",
        )
    state = mixtures[name]
    measured = state.get("measured", {}).get("sources")
    return by_source(audit_commits(commits, name, 0), plan_of(state), measured)


def newest_board(source: Source) -> MixtureView:
    """The mixture of a history as its newest checkpoint has it, with the changes that were made while training."""
    from strata.data.composing.mixture import plan_of

    mixtures = _mixtures(commits_of(source))
    if len(mixtures) != 1:
        names = ", ".join(map(repr, sorted(mixtures))) or "none"
        raise LedgerError(f"The history should have one mixture; it has {names}.")
    plan = plan_of(next(iter(mixtures.values())))
    board = Board(
        run="",
        definition=plan.definition,
        global_batch_size=plan.global_batch_size,
        requests=tuple(Request.adopted(change) for change in plan.changes),
    )
    return mixture_view(board)


def mixtures_in(source: Source) -> list[str]:
    """The mixtures that the history has trained."""
    return sorted(_mixtures(commits_of(source)))


def _mixtures(commits: Sequence[Commit]) -> dict[str, Mapping[str, Any]]:
    """By name: what the newest checkpoint keeps of each."""
    newest = next((commit.data for commit in reversed(commits) if commit.data is not None), None)
    states = newest.states if newest is not None else {}
    return {name: state["mixture"] for name, state in states.items() if "mixture" in state}


def datasets_in(source: Source) -> list[str]:
    """The datasets that the history has trained."""
    return sorted({e.dataset for commit in commits_of(source) if commit.data for e in commit.data.epochs})


def commits_of(source: Source) -> Sequence[Commit]:
    """Every checkpoint of a history, in the order they were made."""
    if not isinstance(source, str | os.PathLike):
        return list(source)
    from strata.checkpoint.catalog.listing import Catalog
    from strata.stores import open_store

    listing = Catalog(open_store(source)).list()
    for problem in listing.problems:
        log.warning("left out of the audit: %s", problem)
    if not listing.entries:
        raise LedgerError(
            f"There is no checkpoint in '{os.fspath(source)}'.",
            hint="Pass the directory or URL that the training job writes its checkpoints to.",
        )
    return [
        Commit(
            checkpoint_id=entry.manifest.checkpoint_id,
            parent_id=entry.manifest.durable_parent,
            trained_from=entry.manifest.parent,
            step=entry.manifest.step,
            data=_record(entry.manifest.data),
        )
        for entry in reversed(listing.entries)
    ]


def _record(data: object) -> DataCommit | None:
    """The data record of a manifest; what another kind of loader left there is none."""
    if not isinstance(data, dict) or "epochs" not in data:
        return None
    return DataCommit.from_json(data)
