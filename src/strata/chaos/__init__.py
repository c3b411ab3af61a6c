"""Injecting faults into a running job, and measuring how it recovers.

    run.py              a job of our own, with faults injected at intervals, watched step by step
    report.py           what was measured, and whether it is good enough
    clients.py          clients of a coordinator that write down all they see
    linearizability.py  whether what they saw can be explained

Only processes that the run itself started are ever touched.
"""
