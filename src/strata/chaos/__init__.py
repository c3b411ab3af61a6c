"""Hurting a running job on purpose, and measuring what it does about it.

    faults.py   what can be done to a job: kill, stop, cut off
    run.py      a job of our own, with faults injected at intervals, watched step by step
    report.py   what was measured, and whether it is good enough

Only processes that the run itself started are ever touched.
"""
