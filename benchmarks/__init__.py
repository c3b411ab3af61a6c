"""Strata beside other projects, and the dashboard in a real browser: what is measured from a checkout.

    python -m benchmarks.recovery       torchft, NVRx and Ray Train, killed as `strata bench recovery` kills
    python -m benchmarks.data           samplers of other projects through changes of the world
    python -m benchmarks.trainers       trainers that crash and come back with another number of workers
    python -m benchmarks.loader_peers   samples a second, by other projects' loaders
    python -m benchmarks.streaming      a dataset in object storage, beside bare obstore
    python -m benchmarks.failover       several coordinators over etcd: appends, leaders that are lost
    python -m benchmarks.compaction     heartbeats while the journal is compacted
    python -m benchmarks.metrics        what `job.log` costs, and how fast a run's page is read back
    python -m benchmarks.replicas       what it costs to compare the ranks' copies (under torchrun)
    python -m benchmarks.dashboard      first paint, sizes and watchers, in Chromium

Their docstrings say what each takes; `plots` draws the tables of docs/benchmarks. What users measure on their own machines is
`strata bench`, in the package.
"""
