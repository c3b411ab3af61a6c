"""A torchrun agent with warm workers, whatever its rendezvous is (`strata.rendezvous.warm`).

    python -m strata.launch.agent --start-method=forkserver --run-path SCRIPT...        (and all else that torchrun takes)

The server that forks the workers imports torch at the same time as the agent does, so the first start is not delayed.
"""

from __future__ import annotations

from multiprocessing import forkserver


def main() -> None:
    # Imported here: each worker reads this module too, as Python's multiprocessing does with its parent's program.
    from strata.rendezvous.preload import preload

    preload()
    forkserver.ensure_running()

    from torch.distributed.run import main as torchrun

    from strata.rendezvous.warm import warm_up

    warm_up()
    torchrun()


if __name__ == "__main__":
    main()
