"""What an installation without extras lacks: said in one sentence that names the extra, before anything is started.

`pip install strata-runtime` brings the coordinator, the command line and the worker library. What trains, reads parquet or
talks to object storage comes with extras.
"""

from __future__ import annotations

from importlib.util import find_spec

from strata.errors import MissingDependency

EXTRAS = {
    "torch": "torch",
    "obstore": "s3",
    "pyarrow": "data",
    "tokenizers": "data",
    "omegaconf": "harness",
    "pynvml": "gpu",
    "cryptography": "security",
    "ray": "ray",
    "opentelemetry": "otel",
    "lightning_fabric": "lightning",
    "pytorch_lightning": "lightning",
    "accelerate": "huggingface",
    "transformers": "huggingface",
}
"""By the name that is imported."""


def need(*packages: str, feature: str, extra: str = "") -> None:
    """Raise `MissingDependency` for the first package that cannot be imported; `extra` is the one that brings them all."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingDependency(package, extra=extra or EXTRAS[package], feature=feature)


def missing_extra(error: ModuleNotFoundError) -> MissingDependency | None:
    """What to say about an import that failed in the middle of a command; None for what no extra brings."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return MissingDependency(package, extra=EXTRAS[package], feature="This command")
