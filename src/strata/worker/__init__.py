"""A training process's side of the wire: one background thread, one stream, and plain calls on top."""

import strata.rpc  # noqa: F401  # Before gRPC: see there.
