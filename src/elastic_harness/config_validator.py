"""Everything that is wrong with a configuration, found at once and before anything starts.

Everything lives in `strata.trainer.validation`.
"""

from __future__ import annotations

from strata.trainer.validation import (
    COUNT,
    FLAG,
    FRACTION,
    NOT_NEGATIVE,
    NOT_NEGATIVE_INT,
    OPTIONAL_TEXT,
    OTHER_NAMES,
    POSITIVE,
    POSITIVE_INT,
    SECTIONS,
    TEXT,
    Finding,
    Key,
    Kind,
    ValidationResult,
    validate_config,
    validate_elastic_config,
    validate_s3_access,
    validate_training_config,
)

__all__ = [
    "COUNT",
    "FLAG",
    "FRACTION",
    "NOT_NEGATIVE",
    "NOT_NEGATIVE_INT",
    "OPTIONAL_TEXT",
    "OTHER_NAMES",
    "POSITIVE",
    "POSITIVE_INT",
    "SECTIONS",
    "TEXT",
    "Finding",
    "Key",
    "Kind",
    "ValidationResult",
    "validate_config",
    "validate_elastic_config",
    "validate_s3_access",
    "validate_training_config",
]
