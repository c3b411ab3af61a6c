import strata.rpc  # noqa: F401  # Before gRPC: see there.
