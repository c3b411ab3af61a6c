"""Strata beside other projects, and the dashboard in a real browser: what is measured from a checkout.

    python -m benchmarks.recovery     torchft and Ray Train, killed as `strata bench recovery` kills
    python -m benchmarks.data         torchdata, DLRover and MosaicML Streaming through changes of the world
    python -m benchmarks.failover     several coordinators over etcd: appends, leaders that are lost
    python -m benchmarks.dashboard    first paint, sizes and watchers, in Chromium

Each takes `--json` and `--quick`. What users measure on their own machines is `strata bench`, in the package.
"""
