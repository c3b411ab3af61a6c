"""Run simulations by hand: `python -m tests.sim --seed 17 --story`, or `--runs 5000` to look for trouble."""

from __future__ import annotations

import argparse

from tests.sim.scenario import Scenario


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds, counting up (default 1)")
    parser.add_argument("--story", action="store_true", help="print everything that happened")
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        scenario = Scenario(seed)
        try:
            result = scenario.run()
        finally:
            if arguments.story:
                print("\n".join(scenario.world.story))
        print(result)


if __name__ == "__main__":
    main()
