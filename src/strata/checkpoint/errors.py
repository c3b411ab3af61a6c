"""What can go wrong with a checkpoint, each as its own type with the facts as fields."""

from __future__ import annotations

from collections.abc import Sequence

import strata
from strata.errors import StrataError
from strata.stores.protocol import StoreError


class CheckpointError(StrataError):
    """Base of every error of the checkpoint engine."""

    code = "checkpoint_error"

    def __reduce__(self) -> tuple[object, ...]:
        """Complete, with its fields: ranks exchange what failed."""
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(
    kind: type[CheckpointError], args: tuple[object, ...], fields: dict[str, object]
) -> CheckpointError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class SaveFailed(CheckpointError):
    """A checkpoint did not reach a tier. Older checkpoints are untouched."""

    code = "save_failed"

    def __init__(
        self, *, tier: str, path: str, reason: str, checkpoint_id: str = "", step: int = -1, hint: str = ""
    ) -> None:
        super().__init__(f"[{tier}] Failed to save checkpoint to '{path}': {reason}", hint=hint)
        self.tier = tier
        self.path = path
        self.reason = reason
        self.checkpoint_id = checkpoint_id
        self.step = step

    @classmethod
    def because(cls, error: Exception, *, tier: str, path: str, checkpoint_id: str, step: int) -> SaveFailed:
        """The same failure, reported as that of a save."""
        if isinstance(error, SaveFailed):
            return error
        reason = (
            error.reason if isinstance(error, StoreError) else getattr(error, "message", "") or str(error)
        )
        failed = cls(
            tier=tier,
            path=path,
            reason=reason or type(error).__name__,
            checkpoint_id=checkpoint_id,
            step=step,
            hint=error.hint if isinstance(error, StrataError) else "",
        )
        failed.__cause__ = error
        return failed


class PeerFailed(CheckpointError):
    """Another rank could not do its part of a save: another attempt here changes nothing."""

    code = "peer_failed"


class SaveSkipped(CheckpointError):
    """A save was not started because the pipeline was full and its policy is to skip."""

    code = "save_skipped"

    def __init__(self, *, reason: str) -> None:
        super().__init__(
            f"The checkpoint was skipped: {reason}.",
            hint="Save less often, use a faster store, or set when_full='wait'.",
        )
        self.reason = reason


class MemoryLimitExceeded(CheckpointError):
    """The state does not fit in the memory it may use. Earlier snapshots are kept."""

    code = "memory_limit_exceeded"

    def __init__(self, *, required_bytes: int, available_bytes: int, hint: str = "") -> None:
        super().__init__(
            f"Cannot save snapshot: {required_bytes / 2**20:.1f}MB required, "
            f"but only {available_bytes / 2**20:.1f}MB available",
            hint=hint,
        )
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes


class UnsupportedState(CheckpointError):
    """The state holds an object that could not be loaded again without running code from the file."""

    code = "unsupported_state"

    def __init__(self, *, name: str, kind: str, hint: str = "") -> None:
        super().__init__(
            f"state[{name}] is a {kind}, which a safe load (weights_only=True) could not restore.",
            hint=hint or "Save tensors, arrays, numbers, strings, and lists, tuples and dicts of them.",
        )
        self.name = name
        self.kind = kind


class Damaged(CheckpointError):
    """Stored bytes are not the bytes that were saved."""

    code = "damaged"

    def __init__(self, *, path: str, reason: str, tensors: Sequence[str] = ()) -> None:
        named = f" (in {', '.join(tensors[:3])}{', …' if len(tensors) > 3 else ''})" if tensors else ""
        super().__init__(
            f"{path}: {reason}{named}",
            hint="It was not used; restore falls back to another copy or an older step.",
        )
        self.path = path
        self.reason = reason
        self.tensors = tuple(tensors)


class NewerFormat(CheckpointError):
    """A newer Strata has written it. It is intact, so nothing falls back behind it: an older step would throw its work away."""

    code = "newer_format"

    def __init__(self, *, path: str, what: str, found: int, newest: int) -> None:
        super().__init__(
            f"{path} has {what} {found}, written by a newer Strata; this is Strata {strata.__version__}, which reads up to "
            f"{newest}.",
            hint="Upgrade Strata here to the version that wrote it, or choose another destination.",
        )
        self.path = path
        self.found = found


class Untrusted(Damaged):
    """A manifest that none of the accepted keys has signed."""

    code = "untrusted"


class LoadFailed(CheckpointError):
    """The requested checkpoint could not be loaded from any tier; `reasons` lists what was tried."""

    code = "load_failed"

    def __init__(
        self,
        message: str,
        *,
        reasons: Sequence[str] = (),
        causes: Sequence[StrataError] = (),
        hint: str = "",
    ) -> None:
        tried = f" Tried: {'; '.join(reasons)}." if reasons else ""
        super().__init__(f"{message}{tried}", hint=hint)
        self.reasons = tuple(reasons)
        self.causes = tuple(causes)
        """What stood in the way, as errors: `Damaged` bytes, a store that is `Unavailable`."""


class CheckpointNotFound(LoadFailed):
    """There is no such checkpoint in any tier."""

    code = "checkpoint_not_found"


class StateMismatch(LoadFailed):
    """The checkpoint is intact, but does not fit the tensors it should be loaded into."""

    code = "state_mismatch"


class Superseded(CheckpointError):
    """A newer start of the same run has taken over: what this process saves is refused at every tier."""

    code = "superseded"

    def __init__(self, *, where: str, generation: int, newest: int) -> None:
        super().__init__(
            f"{where}: generation {newest} of this run has started; this process belongs to generation {generation}.",
            hint="Nothing was saved. Stop this process: the run continues elsewhere.",
        )
        self.where = where
        self.generation = generation
        self.newest = newest


class RunInUse(CheckpointError):
    """Another live job has the same identity."""

    code = "run_in_use"

    def __init__(self, *, where: str, holder: str, hint: str = "") -> None:
        super().__init__(
            f"{where} is in use by another live job ({holder}).",
            hint=hint or "Stop that job, or use another destination for this one.",
        )
        self.where = where
        self.holder = holder


class RunMismatch(CheckpointError):
    """What is kept at a destination belongs to another run. Nothing has been read, changed or removed."""

    code = "run_mismatch"


class FinalSaveFailed(CheckpointError):
    """Training has ended, and its final state is not in every destination."""

    code = "final_save_failed"

    def __init__(self, *, step: int, missing: Sequence[str]) -> None:
        super().__init__(
            f"Training has ended at step {step:,}, and its final state is not in every destination: {'; '.join(missing)}",
            hint="It is still in this machine's memory: start the job again when the destination has space and is reachable.",
        )
        self.step = step
        self.missing = tuple(missing)


class InvalidSave(CheckpointError, ValueError):
    """The arguments of a save are invalid. Nothing has changed."""

    code = "invalid_save"


class ManagerClosed(CheckpointError):
    code = "manager_closed"

    def __init__(self) -> None:
        super().__init__("The checkpoint manager is closed.", hint="Create a new one.")
