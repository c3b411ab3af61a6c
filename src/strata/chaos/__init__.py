"""Injecting faults into a running job, and measuring how it recovers.

    faults.py   what can be done to a job: kill, stop, cut off
    run.py      a job of our own, with faults injected at intervals, watched step by step
    report.py   what was measured, and whether it is good enough

Only processes that the run itself started are ever touched.
"""
