#!/usr/bin/env bash
# Start this machine's part of an elastic training job:  launch_training.sh [options] [-- overrides...]
#
#   --config FILE      examples/configs/small.yaml, or $CONFIG_FILE
#   --script FILE      a script of your own instead of the built-in trainer
#   --nnodes MIN:MAX   1:1, $NNODES or $MIN_NODES:$MAX_NODES     --nproc N   1 or $NPROC_PER_NODE     --max-restarts N   100
#   --backend NAME     strata | etcd | etcd-v2 | c10d     (strata)
#   --endpoint H:P     where the rendezvous is, or $RDZV_ENDPOINT (with strata on one machine none; on several
#                      localhost:50051 or $COORDINATOR_ADDR; localhost:2379 for etcd; localhost:29400 for c10d)
#   --id NAME          the same on every node of the job  (strata-training, or $RDZV_ID)
#   --local-addr IP    this machine's address, where its name is not known to the others
#   --dry-run          print the command and do not run it
#
# Sets what torchrun leaves at minutes to seconds, and what makes every restart clean.
set -euo pipefail

config=${CONFIG_FILE:-examples/configs/small.yaml} script='' nproc=${NPROC_PER_NODE:-1}
backend=${RDZV_BACKEND:-strata} endpoint=${RDZV_ENDPOINT:-} id=${RDZV_ID:-strata-training} max_restarts=100
local_addr='' dry_run=''
nnodes=${NNODES:-1:1}
if [[ -n ${MIN_NODES:-}${MAX_NODES:-} ]]; then
  low=${MIN_NODES:-${NNODES:-1}}
  nnodes=$low:${MAX_NODES:-${NNODES:-$low}}
fi
while (($#)); do
  case $1 in
    --config | --script | --nnodes | --nproc | --max-restarts | --backend | --endpoint | --id | --local-addr)
      [[ $# -ge 2 ]] || { printf 'error: %s needs a value\n' "$1" >&2; exit 2; }
      name=${1#--}; printf -v "${name//-/_}" '%s' "$2"; shift 2 ;;
    --dry-run) dry_run=1; shift ;;
    -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --) shift; break ;;
    *) printf 'error: unknown option %s; see %s --help\n' "$1" "$0" >&2; exit 2 ;;
  esac
done

case $backend in
  c10d) default=localhost:29400 # Open to the network, without a password, and unpickled: see docs/security.md.
    printf 'warning: c10d lets whoever reaches its port run code as you; leave --backend out, or use strata or etcd\n' >&2 ;;
  strata) default=${COORDINATOR_ADDR:-localhost:50051}; case $nnodes in 1 | 1:1) default='' ;; esac ;;
  etcd | etcd-v2) default=${ETCD_ENDPOINT:-localhost:2379} ;;
  *) printf "error: unknown backend '%s'; valid options: c10d, strata, etcd, etcd-v2\n" "$backend" >&2; exit 2 ;;
esac

# Restarted workers must not read the addresses of dead ones out of a store that outlived them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

command=(torchrun
  --nnodes="$nnodes" --nproc-per-node="$nproc" --max-restarts="$max_restarts"
  --rdzv-backend="$backend" --rdzv-endpoint="${endpoint:-$default}" --rdzv-id="$id"
  --rdzv-conf="keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,close_timeout=10")
[[ -z $local_addr ]] || command+=(--local-addr="$local_addr")
if [[ -n $script ]]; then
  command+=("$script" "$@")
else
  command+=(-m elastic_harness.train --config "$config" "$@")
fi

if [[ -n $dry_run ]]; then
  printf '%q ' TORCH_DISABLE_SHARE_RDZV_TCP_STORE="$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "${command[@]}"
  printf '\n'
  exit 0
fi
exec "${command[@]}"
