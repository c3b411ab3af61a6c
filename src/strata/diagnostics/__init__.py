"""What is wrong with this machine, for training: checks that look and never change anything.

Each check gives results with a verdict, what was found, and how to fix it: `ok`, `warn` (works, but), `fail` (will
not work), `skip` (was not requested, or cannot be checked from here). A check never takes longer than its time-outs,
never raises, and leaves nothing behind; the S3 probe writes one small object and removes it.
"""

from __future__ import annotations

from strata.diagnostics.report import CheckResult, Targets, Verdict, run_all
from strata.diagnostics.storage import probe_s3

__all__ = ["CheckResult", "Targets", "Verdict", "probe_s3", "run_all"]
