"""Real faults, on real processes: what is acknowledged stays, and nobody is failed by mistake.

What is here puts healthy workers beside the fault and looks at both. Where a part is tested for itself, its faults are there:

| fault | where |
|---|---|
| SIGKILL and SIGTERM of the coordinator under load | tests/service/test_coordinator_crash.py |
| SIGKILL and SIGSTOP of workers | tests/service/test_lost_workers.py |
| SIGSTOP and SIGCONT of the coordinator | test_processes.py |
| cuts between network namespaces | test_network.py; of ranks and agents tests/training/test_recoverable_faults.py |
| delay, resets, trickle, connections that fall silent | test_network.py; barriers tests/service/test_barriers.py |
| a disk that fills up, an fsync that fails, a journal's damaged tail | tests/service/test_full_disk.py, test_journal.py |
| a disk that fills up under load, and is freed | test_processes.py |
| two coordinators on one data directory | test_processes.py |
| a clock that is set back | test_processes.py |
| thousands of connections, rapid reset, slowloris, floods | test_attacks.py; limits tests/service/test_limits.py |
| SIGKILL and SIGSTOP of the leader among several coordinators | test_failovers.py, test_failover_under_load.py, tests/service/test_failover.py; with runs on Ray and Slurm tests/launch/test_*_takeover.py |
| members of etcd killed and cut off, etcd out of space, a leader cut off from it in one direction | test_etcd.py; a lost majority tests/service/test_failover.py |
| coordinators that stand by, dead and frozen addresses | tests/service/test_several_coordinators.py |
"""
