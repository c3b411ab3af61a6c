"""In which failure domains a checkpoint is safe, and what would be lost if one of them failed now.

A **copy** is where a checkpoint, or a part of one, lies: in the memory of a machine, in a peer's memory, on a disk, in object storage. A
**domain** is what fails at once: a process, a machine, a rack, the site. A checkpoint is safe in a domain if what is left of its copies
makes it up whichever one of that domain is lost. It is not known which machine will fail: one that some machine's loss would cost is not
safe.

What is not known to survive counts as lost. A disk that another machine keeps outlives a machine, and nothing is known of its rack. Racks
are spoken of only where they have names.

Pure: the one computation behind `strata checkpoint where`, the API and the dashboard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from strata.core.text import counted

Domain = Literal["process", "machine", "rack", "site"]
Kind = Literal["memory", "peer", "disk", "network disk", "bucket"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
LABELS: dict[Domain, str] = {
    "process": "Process dies",
    "machine": "Machine dies",
    "rack": "Rack lost",
    "site": "Site lost",
}
_NOTHING: dict[Domain, str] = {
    "process": "everything, nothing was saved",
    "machine": "everything, no copy off the machine",
    "rack": "everything, no copy off the rack",
    "site": "everything, no bucket copy",
}
_DISKS = frozenset({"nvme", "local", "disk", "file"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Where a checkpoint is stored, or one part of it."""

    checkpoint_id: str
    step: int
    saved_at: float
    """Tells which is newer: after a fallback a newer one may have a smaller step."""
    kind: Kind
    host: str = ""
    """Whose memory or disk it is; empty where no machine of the run has it."""
    rack: str = ""
    where: str = ""
    """Its path or URL, as far as known."""
    part: str = ""
    """What of the checkpoint it is; empty for all of it."""
    parts: tuple[str, ...] = ()
    """What all of it consists of."""
    verified: bool | None = None
    """Whether its bytes matched their digests, lately: None where they were not compared."""

    @property
    def is_off_site(self) -> bool:
        return self.kind == "bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What would be lost if one failure domain failed now."""

    domain: Domain
    label: str
    steps: int | None
    """None: everything."""
    from_step: int | None
    """Where training would continue; None: at its beginning."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """The known copies of a run's checkpoints."""

    run: str
    """The job or the run's id, as it was asked for."""
    reached: int
    """The step that training has come to."""
    step: int | None
    """Which was asked about; None: the newest."""
    copies: tuple[Copy, ...]
    """Of that step, near to far."""
    safe_in: tuple[Domain, ...]
    """The domains in which any one may fail, and it is still there."""
    losses: tuple[Loss, ...]
    problems: tuple[str, ...] = ()
    """What could not be asked: nothing is known of it."""


def kind_of(tier: str, *, is_on_network: bool = False) -> Kind:
    """MEMORY, PEER, NVME, LOCAL, S3, GCS … → what it is."""
    name = tier.lower()
    if name == "memory":
        return "memory"
    if name == "peer":
        return "peer"
    if name in _DISKS:
        return "network disk" if is_on_network else "disk"
    return "bucket"


def is_complete(copies: Iterable[Copy]) -> bool:
    """Whether these make up the checkpoint that they are copies of."""
    there, wanted = set[str](), set[str]()
    for copy in copies:
        if copy.verified is False:
            continue
        if not copy.part:
            return True
        there.add(copy.part)
        wanted.update(copy.parts)
    return bool(there) and wanted <= there


def survives(copies: Sequence[Copy], lost: Domain) -> bool:
    """Whether a checkpoint with these copies is still there when any one of this domain is lost."""
    if lost == "process":
        return is_complete(copies)
    if lost == "site":
        return is_complete(copy for copy in copies if copy.is_off_site)
    if lost == "machine":
        hosts = {copy.host for copy in copies if copy.host}
        return is_complete(copies) and all(
            is_complete(copy for copy in copies if copy.host != host) for host in hosts
        )
    racks = {copy.rack for copy in copies if copy.rack}
    placed = [copy for copy in copies if copy.rack or copy.is_off_site]
    return is_complete(placed) and all(
        is_complete(copy for copy in placed if copy.is_off_site or copy.rack != rack) for rack in racks
    )


def domains_of(copies: Iterable[Copy]) -> tuple[Domain, ...]:
    """Those that can be spoken of."""
    has_racks = any(copy.rack for copy in copies)
    return tuple(domain for domain in DOMAINS if domain != "rack" or has_racks)


def losses(copies: Sequence[Copy], *, reached: int) -> tuple[Loss, ...]:
    """One for each domain, of all copies of a run."""
    checkpoints: dict[str, list[Copy]] = {}
    for copy in sorted(copies, key=lambda copy: copy.saved_at, reverse=True):
        checkpoints.setdefault(copy.checkpoint_id, []).append(copy)
    found = []
    for domain in domains_of(copies):
        newest = next((each for each in checkpoints.values() if survives(each, domain)), None)
        from_step = newest[0].step if newest is not None else None
        steps = None if from_step is None else max(0, reached - from_step)
        found.append(
            Loss(
                domain=domain,
                label=LABELS[domain],
                steps=steps,
                from_step=from_step,
                text=_NOTHING[domain] if steps is None else counted(steps, "step"),
            )
        )
    return tuple(found)


def safety_of(
    copies: Sequence[Copy],
    *,
    reached: int,
    run: str = "",
    step: int | None = None,
    problems: Sequence[str] = (),
) -> Safety:
    """What is known of a step, by default of the newest checkpoint that is all there, and of the run."""
    asked = [copy for copy in copies if copy.step == step]
    if step is None:
        newest: dict[str, list[Copy]] = {}
        for copy in sorted(copies, key=lambda copy: copy.saved_at, reverse=True):
            newest.setdefault(copy.checkpoint_id, []).append(copy)
        asked = next((each for each in newest.values() if is_complete(each)), [])
        step = asked[0].step if asked else None
    by_id: dict[str, list[Copy]] = {}
    for copy in asked:
        by_id.setdefault(copy.checkpoint_id, []).append(copy)
    near = sorted(asked, key=lambda copy: (list(get_args(Kind)).index(copy.kind), copy.host, copy.where))
    return Safety(
        run=run,
        reached=reached,
        step=step,
        copies=tuple(near),
        safe_in=tuple(
            domain for domain in domains_of(copies) if any(survives(each, domain) for each in by_id.values())
        ),
        losses=losses(copies, reached=reached),
        problems=tuple(problems),
    )
