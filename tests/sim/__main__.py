"""Run simulations by hand: `python -m tests.sim --seed 17 --story`, or `--whole --runs 5000` to look for trouble.

Python, msgspec and numpy are all that it needs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import Counter
from pathlib import Path

from tests.sim import leadership, whole
from tests.sim.job import Simulation, simulate
from tests.sim.scenario import SimulationFailed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds, counting up (default 1)")
    parser.add_argument(
        "--job", action="store_true", help="an elastic job instead of a coordinator and its fleet"
    )
    parser.add_argument(
        "--leadership", action="store_true", help="several coordinators over one store instead"
    )
    parser.add_argument(
        "--machines", action="store_true", help="with agents that speak for the workers of their machines"
    )
    parser.add_argument(
        "--whole", action="store_true", help="coordinators, agents, workers and a job together, in one world"
    )
    parser.add_argument("--processes", type=int, help="with --whole: on so many processors (default: all)")
    parser.add_argument(
        "--keep-going", action="store_true", help="with --whole: do not end at the first that fails"
    )
    parser.add_argument("-o", "--output", type=Path, help="with --whole: write the result here, as JSON")
    parser.add_argument("--story", action="store_true", help="print everything that happened")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    if arguments.whole:
        if arguments.story:
            tell_whole(seeds)
        elif not run_whole(seeds, arguments.processes, arguments.output, keep_going=arguments.keep_going):
            raise SystemExit(1)
        return
    if arguments.job:
        run_jobs(seeds, story=arguments.story)
        return
    if arguments.leadership:
        run_leadership(seeds, story=arguments.story)
        return
    from tests.sim.machines import MachineScenario
    from tests.sim.scenario import Scenario

    for seed in seeds:
        scenario = MachineScenario(seed) if arguments.machines else Scenario(seed)
        try:
            result = scenario.run()
        finally:
            if arguments.story:
                print("\n".join(scenario.world.story))
        print(result)


def tell_whole(seeds: range) -> None:
    for seed in seeds:
        scenario = whole.WholeScenario(seed)
        try:
            print(scenario.simulate())
        finally:
            print("\n".join(scenario.world.story))


def run_whole(seeds: range, processes: int | None, output: Path | None, *, keep_going: bool) -> bool:
    """Whether every schedule held. The first that does not ends the search, unless it keeps going; their stories are printed."""
    began_s, counts, done = time.monotonic(), Counter[str](), 0
    failures: dict[int, str] = {}
    with multiprocessing.Pool(processes) as pool:
        for done, found in enumerate(pool.imap_unordered(whole.try_out, seeds, chunksize=10), 1):
            if isinstance(found, SimulationFailed):
                failures[found.seed] = str(found)
                print(found, flush=True)
                if not keep_going:
                    break
            else:
                counts.update(found.counts)
            if done % 1_000 == 0 or done == len(seeds):
                print(f"{done:,} schedules, {time.monotonic() - began_s:.0f} s", flush=True)
    result = {
        "first_seed": seeds.start,
        "last_seed": seeds.stop - 1,
        "schedules": done,
        "seconds": round(time.monotonic() - began_s, 1),
        "processes": processes or multiprocessing.cpu_count(),
        "failed_seeds": sorted(failures),
        "counts": dict(sorted(counts.items())),
    }
    if output is not None:
        output.write_text(json.dumps({**result, "failures": failures}, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return not failures


def run_leadership(seeds: range, *, story: bool) -> None:
    """As `run_jobs`, with what several coordinators do."""
    if story:
        for seed in seeds:
            scenario = leadership.Scenario(seed)
            try:
                print(scenario.run())
            finally:
                print("\n".join(scenario.world.story))
        return
    began_s, counts = time.monotonic(), Counter[str]()
    with multiprocessing.Pool() as pool:
        for done, found in enumerate(pool.imap_unordered(leadership.simulate, seeds, chunksize=50), 1):
            counts.update(found.counts)
            if done % 5_000 == 0 or done == len(seeds):
                print(f"{done:,} schedules, {time.monotonic() - began_s:.0f} s: {dict(counts)}", flush=True)


def run_jobs(seeds: range, *, story: bool) -> None:
    """Many of them on all processors; what went wrong in any of them ends the search."""
    if story:
        for seed in seeds:
            simulation = Simulation(seed)
            try:
                print(simulation.run())
            finally:
                print("\n".join(simulation.story))
        return
    began_s, counts = time.monotonic(), Counter[str]()
    with multiprocessing.Pool() as pool:
        for done, found in enumerate(pool.imap_unordered(simulate, seeds, chunksize=50), 1):
            counts.update(found)
            if done % 5_000 == 0 or done == len(seeds):
                print(f"{done:,} schedules, {time.monotonic() - began_s:.0f} s: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
