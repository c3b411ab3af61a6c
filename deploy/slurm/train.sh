#!/bin/bash
#SBATCH --job-name=example
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --no-kill
#
# Submit with: sbatch THIS_FILE. The token of the coordinator, if it has one, comes from STRATA_TOKEN in your environment.
set -euo pipefail

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=1
export COORDINATOR_ADDR=coordinator.example.org:50051
export STRATA_JOB_ID=example

# Slurm's warning before the time limit: workers save and leave, and the job queues up again.
again=''
leave() {
  printf 'the time limit is near: saving and leaving\n'
  again=1
  for _ in {1..5}; do # The step, not srun, which would kill it; again where a node was not reached.
    scancel --signal=TERM "$SLURM_JOB_ID.0" && break
    sleep 1
  done
}
trap leave USR1

# One agent a node. A lost node ends its own agent only; the others meet again without it.
srun \
  --label \
  --no-kill \
  --kill-on-bad-exit=0 \
  --wait=0 \
  python3 \
  -m \
  strata.launch.agent \
  --nnodes=1:4 \
  --nproc-per-node=8 \
  --max-restarts=100 \
  --rdzv-backend=strata \
  --rdzv-endpoint=coordinator.example.org:50051 \
  --rdzv-id=example \
  --rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,close_timeout=10 \
  --monitor-interval=0.1 \
  --start-method=spawn \
  -m \
  strata.trainer.train \
  --config \
  /shared/run-7/config.yaml &
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
