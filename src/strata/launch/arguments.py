"""What `strata torchrun` makes of torchrun's flags: torch's own parser, with other defaults.

| flag | without it |
|---|---|
| `--rdzv-backend`, `--rdzv-endpoint` | this machine alone, with nothing beside it; with an endpoint: the coordinator there |
| `--master-addr`, `--master-port` | loopback and a free port; on one machine the workers meet there; on several they are a static rendezvous |
| `--rdzv-id` | on one machine one of its own |
| `--rdzv-conf` | recovery in seconds; what is given is added and wins |
| `--max-restarts` | 1000: an error that comes back ends the run long before |
| `--monitor-interval` | 0.1 s |
| `--start-method` | forkserver: workers start with torch imported; `spawn` starts each from nothing |

Two flags are ours: `--spares N` keeps N processes more on this machine, which stand by for workers that are lost
(`strata.recoverable`); `--no-health-check` joins without examining this machine first.

A variable `PET_…` counts as the flag that torchrun reads it for; so do `NNODES`, `NPROC_PER_NODE`, `RDZV_BACKEND`,
`RDZV_ENDPOINT` and `RDZV_ID`, where neither a flag nor torchrun's own variable says otherwise. This module needs no
torch until `launch`.
"""

from __future__ import annotations

import os
import sys
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from strata.agent import POLICY_VARIABLE, run_policy
from strata.agent.health_gate import HEALTH_VARIABLE
from strata.agent.health_gate import mode as health_mode
from strata.agent.notices import chosen as chosen_notices
from strata.core.faults.restarts import PolicyError
from strata.environment import nodes_wanted
from strata.rendezvous import LOOPBACK, LOOPBACK_ONLY, TORCHRUN_ENVIRONMENT, rdzv_conf

if TYPE_CHECKING:
    from strata.agent.notices import NoticeWatch

MAX_RESTARTS = 1000
MONITOR_S = 0.1
VARIABLES = {**TORCHRUN_ENVIRONMENT, "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""For the agent and all it starts, where the environment says nothing else. Torch's libraries log twenty lines of addresses for every
connection that ends with a peer."""
COMMON_VARIABLES = ("NPROC_PER_NODE", "RDZV_BACKEND", "RDZV_ENDPOINT", "RDZV_ID")
"""What job scripts set, each for the flag of its name; and `nodes_wanted`."""
WRONG_CALL = 2
UNSAFE_BACKENDS = {
    "c10d": "--rdzv-backend=c10d opens torch's rendezvous on every interface of this machine, without a password, and "
    "unpickles its contents: anyone who reaches the port can run code as you. Omit it on one machine; on several use "
    "--rdzv-backend=strata or etcd.",
    "static": "a static rendezvous (--master-addr) opens torch's key-value store on every interface of that machine, "
    "without a password. Omit it on one machine; on several use --rdzv-backend=strata or etcd.",
}
"""Torch's own, which the user may ask for: what that means."""
_NEEDS_ENDPOINT = (
    "--nnodes={nnodes} allows several machines, which need a rendezvous endpoint. Start a coordinator on one of them "
    "(`strata serve --host 0.0.0.0` with a token; see docs/operating/deploying.md) and pass --rdzv-endpoint=HOST:50051 "
    "on every machine; or use etcd: --rdzv-backend=etcd --rdzv-endpoint=HOST:2379. For a fixed set of machines, one of "
    "them can also be the master: --master-addr=HOST --master-port=29500 --node-rank=N."
)


def may_be_warm(words: Sequence[str]) -> bool:
    """Whether it is worth starting the fork server before torch, and with it the parser, is imported."""
    cold = ("--no-python", "--no_python", "--start-method", "--start_method", "-h", "--help")
    return not any(word.partition("=")[0] in cold and not word.endswith("=forkserver") for word in words)


def run_named(words: Sequence[str]) -> str:
    """The run's id, where the call names it: asked before torch, and with it the parser, is imported."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if name in ("--rdzv-id", "--rdzv_id"):
            return value or following
    return os.environ.get("PET_RDZV_ID") or os.environ.get("RDZV_ID", "")


def parse(words: Sequence[str]) -> Namespace:
    """Raises `SystemExit` with a sentence for a call that cannot work."""
    from torch.distributed.run import get_args_parser

    parser: ArgumentParser = get_args_parser()
    parser.prog = "strata torchrun"
    _add_spares(parser)
    _add_health(parser)
    ours: dict[str, Any] = {
        "rdzv_backend": None,
        "rdzv_id": None,
        "master_addr": None,
        "master_port": None,  # Of older versions it is 29500.
        "max_restarts": MAX_RESTARTS,
        "monitor_interval": MONITOR_S,
        "start_method": None,
    }
    ours |= {name.lower(): os.environ[name] for name in COMMON_VARIABLES if os.environ.get(name)}
    if nodes := nodes_wanted(os.environ):
        ours["nnodes"] = nodes
    parser.set_defaults(
        **{key: value for key, value in ours.items() if f"PET_{key.upper()}" not in os.environ}
    )
    args = parser.parse_args(words)
    try:
        _fill(args)
    except _WrongCall as error:
        print(f"strata torchrun: error: {error}", file=sys.stderr)
        raise SystemExit(WRONG_CALL) from None
    return args


def _add_spares(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--spares",
        type=int,
        default=os.environ.get("PET_SPARES", "0"),
        metavar="N",
        help="Standby processes on this machine, waiting at the script's @strata.recoverable function with CUDA contexts "
        "on the workers' GPUs. One replaces a lost worker at once, and another is started.",
    )


def _add_health(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--no-health-check",
        action="store_true",
        default=os.environ.get("PET_NO_HEALTH_CHECK", "") not in ("", "0"),
        help="Join without checking this machine first (GPUs, memory, disk, clock, loopback); the same as STRATA_HEALTH=off.",
    )


class _WrongCall(Exception):
    pass


def _fill(args: Namespace) -> None:
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        _, max_nodes = parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError, AssertionError):
        raise _WrongCall(
            f"--nnodes={args.nnodes}: give a number of machines, or a range, such as 1:4"
        ) from None
    try:
        workers = determine_local_world_size(args.nproc_per_node)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise _WrongCall(f"--nproc-per-node={args.nproc_per_node}: {error}") from None
    if workers < 1:
        raise _WrongCall(f"--nproc-per-node={args.nproc_per_node}: give at least one worker")
    try:
        run_policy()
    except PolicyError as error:
        raise _WrongCall(f"{POLICY_VARIABLE}: {error}") from None
    if args.no_health_check:
        os.environ[HEALTH_VARIABLE] = "off"
    try:
        chosen_notices()
        health_mode()
    except ValueError as error:
        raise _WrongCall(str(error)) from None
    args.rdzv_conf = ",".join(filter(None, (rdzv_conf(), args.rdzv_conf)))
    if args.standalone:
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id, args.standalone = "strata", "", None, False
    elif args.rdzv_backend is None:
        names_master = args.master_addr is not None or args.master_port is not None
        is_static = max_nodes > 1 and not args.rdzv_endpoint and names_master
        args.rdzv_backend = "static" if is_static else "strata"
    if args.rdzv_backend in UNSAFE_BACKENDS:
        print(f"strata torchrun: warning: {UNSAFE_BACKENDS[args.rdzv_backend]}", file=sys.stderr)
    is_local = args.rdzv_backend == "strata" and not args.rdzv_endpoint
    if is_local and max_nodes > 1:
        raise _WrongCall(_NEEDS_ENDPOINT.format(nnodes=args.nnodes))
    if is_local:
        _stay_on_this_machine(args)
    if args.rdzv_id is None:
        args.rdzv_id = str(uuid.uuid4()) if is_local else "none"  # As torch has it.
    if args.rdzv_backend == "static":
        args.master_addr = args.master_addr or LOOPBACK
        args.master_port = args.master_port or 29500
    else:
        del args.master_addr  # Torch warns of one that it does not use.
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # As torch does, at length.
    if args.spares < 0:
        raise _WrongCall(f"--spares={args.spares}: pass the number of standby processes, or omit it.")
    if args.spares and getattr(args, "virtual_local_rank", False):
        raise _WrongCall(
            "--spares with --virtual-local-rank: a spare must see the GPUs of all workers, because it may "
            "replace any of them. Omit one of the two."
        )
    if args.start_method is None:
        args.start_method = "spawn" if args.no_python or "PYTHON_EXEC" in os.environ else "forkserver"


def _stay_on_this_machine(args: Namespace) -> None:
    if args.master_addr is not None:
        args.rdzv_conf += f",master_addr={args.master_addr}"
    else:
        for name, value in LOOPBACK_ONLY.items():
            os.environ.setdefault(name, value)
    if args.master_port is not None:
        args.rdzv_conf += f",master_port={args.master_port}"


def entrypoint(args: Namespace, command: Any, words: list[str]) -> tuple[Any, list[str]]:
    """What workers run, in place of torch's `command` and its `words`: Python programs report how they failed."""
    from strata.launch.entry import run_file, run_module

    if args.no_python:
        return command, words
    program = [args.training_script, *args.training_script_args]
    if args.start_method == "forkserver" or args.run_path:
        run: Callable[..., None] = run_module if args.module else run_file
        return run, program
    flags = ["-u", "-m", "strata.launch.entry", *(["-m"] if args.module else [])]
    return command, [*flags, *program]


def launch(words: Sequence[str]) -> int:
    """Parse, run the agent to its end, and return the exit status. What a failed run says last is the script's."""
    from strata.agent.health_gate import check_alone
    from strata.agent.regrouping import RegroupingAgent
    from strata.agent.warm import warm_up

    args = parse(words)
    if not (args.module or args.no_python or os.path.exists(args.training_script)):
        print(f"strata torchrun: error: there is no script {args.training_script}", file=sys.stderr)
        return WRONG_CALL
    warm_up(args.rdzv_id)
    RegroupingAgent.wanted_spares = args.spares
    with ExitStack() as cleanup:
        # Torch would leave an empty one behind.
        if args.log_dir is None and args.redirects == args.tee == "0":
            args.log_dir = cleanup.enter_context(TemporaryDirectory(prefix="strata-torchrun-"))
        if not args.rdzv_endpoint and (unfit := check_alone()):
            print(f"strata torchrun: error: this machine is not fit to train: {unfit}", file=sys.stderr)
            return 1
        if (notices := _watch_notices(args)) is not None:
            cleanup.callback(notices.close)
        return _launch(args)


def _watch_notices(args: Namespace) -> NoticeWatch | None:
    from strata.agent.careful import coordinator_of_run
    from strata.agent.notices import watch

    endpoint = args.rdzv_endpoint if args.rdzv_backend == "strata" else ""
    return watch(coordinator_of_run() or endpoint)


def _launch(args: Namespace) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    from strata.agent.trace import forget_rendezvous

    try:
        config, command, command_words = config_from_args(args)
        run, run_words = entrypoint(args, command, command_words)
        elastic_launch(config=config, entrypoint=run)(*run_words)
    except ChildFailedError as error:
        return _report_failure(error)
    except SignalException as error:
        from strata.agent.careful import CarefulAgent

        if CarefulAgent.given_up is not None:
            print(f"strata torchrun: this machine leaves the run: {CarefulAgent.given_up}", file=sys.stderr)
        return 128 + int(error.sigval)
    except (RendezvousError, ValueError, AssertionError) as error:
        print(f"strata torchrun: error: {error}", file=sys.stderr)
        return 1
    finally:
        forget_rendezvous(args.rdzv_id)  # Torch does not notify the handler of a run that a signal has ended.
    return 0


def _report_failure(failed: Any) -> int:
    from strata.agent.careful import CarefulAgent
    from strata.agent.supervised import SUPERVISOR_VARIABLE

    rank, failure = failed.get_first_failure()
    first, given_up = CarefulAgent.first_failure, CarefulAgent.given_up
    error = first.error if first is not None else None
    sys.stdout.flush()
    if given_up is not None:
        print(f"strata torchrun: not started again: {given_up}", file=sys.stderr)
    elif failure.exitcode < 0:
        print(f"strata torchrun: rank {rank} was killed by {failure.signal_name()}", file=sys.stderr)
    else:
        print(f"strata torchrun: rank {rank} ended with status {failure.exitcode}", file=sys.stderr)
    # The supervisor of a run has it already.
    if error is not None and error.traceback and SUPERVISOR_VARIABLE not in os.environ:
        print(error.traceback, end="", file=sys.stderr)
    return int(failure.exitcode) if failure.exitcode > 0 else 128 - int(failure.exitcode)
