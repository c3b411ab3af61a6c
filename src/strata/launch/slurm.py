"""A batch script that runs a torchrun agent on every node of a Slurm job, meeting through the coordinator.

Guarantees of the script: before the time limit the workers are asked to save and leave, and the job goes back into the
queue under the same name, where it continues from its checkpoint; a lost node does not end the job while `min_nodes`
are left; no secret is written into it (the token travels in the environment that sbatch passes on). It only writes the
script: nothing is submitted here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from strata.config import ConfigError
from strata.launch.torchrun import LEAVE_S, TorchrunSpec
from strata.rendezvous import TORCHRUN_ENVIRONMENT

WARNING_S = 120
"""Before the time limit: enough for a final checkpoint to an object store."""
TIME = re.compile(r"\d+|(\d+-)?\d{1,2}(:\d{1,2}){0,2}|\d+:\d{1,2}(:\d{1,2})?")
WORD = re.compile(r"[\w.,:@+=/%-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What is asked of Slurm. Everything that is left empty is left to the cluster's defaults."""

    nodes: int = 1
    min_nodes: int = 1
    """Training continues while at least this many are left."""
    workers_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_node: int = 0
    memory: str = ""
    time: str = ""
    """Slurm's notation: minutes, H:M:S, days-hours."""
    partition: str = ""
    account: str = ""
    warning_s: int = WARNING_S
    output: str = "%x-%j.log"
    python: str = "python3"
    """The Python on the nodes that has Strata."""
    setup: str = ""
    """A file to source on the batch node first, such as a virtual environment's bin/activate."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """Everything that is wrong, in words."""
        found = [
            f"{name} must be at least 1, not {value}"
            for name, value in (
                ("nodes", self.nodes),
                ("min_nodes", self.min_nodes),
                ("workers_per_node", self.workers_per_node),
            )
            if value < 1
        ]
        found += [
            f"{name} must not be negative"
            for name, value in (("gpus_per_node", self.gpus_per_node), ("cpus_per_node", self.cpus_per_node))
            if value < 0
        ]
        if self.min_nodes > self.nodes >= 1:
            found.append(f"min_nodes ({self.min_nodes}) cannot exceed nodes ({self.nodes})")
        if self.warning_s < LEAVE_S:
            found.append(
                f"warning_s ({self.warning_s}) must be at least {LEAVE_S:g}: workers save before they leave"
            )
        if self.time and not TIME.fullmatch(self.time):
            found.append(f"time '{self.time}' is not Slurm's notation: minutes, H:M:S, or days-hours")
        found += [
            f"{name} '{value}' has characters that Slurm's options do not take"
            for name, value in (
                ("memory", self.memory),
                ("partition", self.partition),
                ("account", self.account),
                ("output", self.output),
            )
            if value and not WORD.fullmatch(value)
        ]
        found += [
            f"environment: '{name}' is not a variable name"
            for name in self.environment
            if not name.isidentifier()
        ]
        return found


def sbatch_script(spec: TorchrunSpec, options: SlurmOptions) -> str:
    """The script for `sbatch`. `spec` says what is trained and where agents meet; `options` where it runs.

    Raises `ConfigError` with everything that is wrong."""
    problems = options.problems()
    if not WORD.fullmatch(spec.run_id):
        problems.append(f"run id '{spec.run_id}' has characters that Slurm's options do not take")
    if problems:
        raise ConfigError(problems)
    on_nodes = replace(
        spec,
        nproc=options.workers_per_node,
        min_nodes=options.min_nodes,
        max_nodes=options.nodes,
        local_addr=None,
    )
    variables = {
        **TORCHRUN_ENVIRONMENT,
        "OMP_NUM_THREADS": "1",
        **spec.environment,
        **options.environment,
    }
    return TEMPLATE.format(
        directives="\n".join(f"#SBATCH {line}" for line in _directives(spec.run_id, options)),
        setup=f"source {shlex.quote(options.setup)}\n" if options.setup else "",
        variables="\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        steps=_continued(_srun(options)),
        agent=_continued(on_nodes.command(python=options.python)),
    )


def _directives(name: str, options: SlurmOptions) -> list[str]:
    return [
        f"--job-name={name}",
        f"--nodes={options.nodes}",
        "--ntasks-per-node=1",
        *([f"--cpus-per-task={options.cpus_per_node}"] if options.cpus_per_node else []),
        *([f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []),
        *([f"--mem={options.memory}"] if options.memory else []),
        *([f"--time={options.time}"] if options.time else []),
        *([f"--partition={options.partition}"] if options.partition else []),
        *([f"--account={options.account}"] if options.account else []),
        f"--output={options.output}",
        "--open-mode=append",
        f"--signal=B:USR1@{options.warning_s}",
        "--requeue",
        "--no-kill",
    ]


def _srun(options: SlurmOptions) -> list[str]:
    cpus = [f"--cpus-per-task={options.cpus_per_node}"] if options.cpus_per_node else []
    return ["srun", "--label", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", *cpus]


def _continued(words: list[str]) -> str:
    """One word a line: long commands are read and changed by people."""
    return " \\\n  ".join(shlex.quote(word) for word in words)


TEMPLATE = """\
#!/bin/bash
{directives}
#
# Submit with: sbatch THIS_FILE. The token of the coordinator, if it has one, comes from STRATA_TOKEN in your environment.
set -euo pipefail

{setup}{variables}

# Slurm's warning before the time limit: workers save and leave, and the job queues up again.
again=''
leave() {{
  printf 'the time limit is near: saving and leaving\\n'
  again=1
  for _ in {{1..5}}; do # The step, not srun, which would kill it; again where a node was not reached.
    scancel --signal=TERM "$SLURM_JOB_ID.0" && break
    sleep 1
  done
}}
trap leave USR1

# One agent a node. A lost node ends its own agent only; the others meet again without it.
{steps} \\
  {agent} &
agents=$!

while :; do # A signal ends the wait, not the agents.
  wait "$agents" || true
  kill -0 "$agents" 2>/dev/null || break
done
status=0
wait "$agents" || status=$?
if [[ -n $again && $status -ne 0 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
