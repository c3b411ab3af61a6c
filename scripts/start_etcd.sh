#!/usr/bin/env bash
# One etcd on this machine, for torchrun's rendezvous: start | stop | restart | status | logs | clean
#
# Uses a local etcd binary, or Docker where there is none. Stops only what it started itself.
#
#   ETCD_PORT (2379), ETCD_PEER_PORT (2380)   where it listens
#   ETCD_HOST (127.0.0.1)                     0.0.0.0 to serve other nodes: etcd asks nobody for a password
#   ETCD_ADVERTISE_HOST                       the name other nodes reach it by (default: this host's, or ETCD_HOST)
#   ETCD_DATA_DIR (~/.local/state/strata/etcd-PORT)
#   ETCD_BIN (etcd), ETCD_USE_DOCKER=1, ETCD_IMAGE (quay.io/coreos/etcd:v3.5.21)
#   ETCD_START_TIMEOUT_S (30)
set -euo pipefail

port=${ETCD_PORT:-2379}
peer_port=${ETCD_PEER_PORT:-2380}
host=${ETCD_HOST:-127.0.0.1}
home=${XDG_STATE_HOME:-${HOME:-/tmp}/.local/state}/strata/etcd-$port
data_dir=${ETCD_DATA_DIR:-$home}
binary=${ETCD_BIN:-etcd}
image=${ETCD_IMAGE:-quay.io/coreos/etcd:v3.5.21}
container=strata-etcd-$port
timeout_s=${ETCD_START_TIMEOUT_S:-30}
use_docker=${ETCD_USE_DOCKER:-}
pid_file=$data_dir/etcd.pid
log_file=$data_dir/etcd.log
if [[ $host == 0.0.0.0 ]]; then
  advertise=${ETCD_ADVERTISE_HOST:-$(hostname -f 2>/dev/null || hostname)}
  reach=127.0.0.1
else
  advertise=${ETCD_ADVERTISE_HOST:-$host}
  reach=$host
fi
# etcd reads every ETCD_* variable itself, and refuses to start when one of them also comes as a flag.
for name in "${!ETCD_@}"; do unset "$name"; done

say() { printf '%s\n' "$*"; }
fail() { printf 'error: %s\n' "$1" >&2; shift; for line in "$@"; do printf '  %s\n' "$line" >&2; done; exit 1; }

healthy() {
  if command -v curl >/dev/null; then
    curl -fsS --max-time 5 "http://$reach:$port/health" 2>/dev/null | grep -q '"health": *"true"'
  else
    python3 - "http://$reach:$port/health" <<'PY' 2>/dev/null
import sys, urllib.request
sys.exit(b'"true"' not in urllib.request.urlopen(sys.argv[1], timeout=5).read())
PY
  fi
}

# The process we started, if it still is that one: a pid may have gone to somebody else since. The start time, in
# clock ticks since boot, tells them apart.
started_at() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }
own_pid() {
  [[ -f $pid_file ]] || return 1
  local pid ticks
  read -r pid ticks <"$pid_file" || return 1
  [[ -n $pid && -n $ticks && $(started_at "$pid") == "$ticks" ]] || return 1
  say "$pid"
}
own_container() { command -v docker >/dev/null && [[ $(docker ps -q -f "name=^$container\$" 2>/dev/null) ]]; }
running() { own_pid >/dev/null || own_container; }

listen_flags() {
  say "--name=strata"
  say "--listen-client-urls=http://$1:$port"
  say "--advertise-client-urls=http://$advertise:$port"
  say "--listen-peer-urls=http://$1:$peer_port"
  say "--initial-advertise-peer-urls=http://$reach:$peer_port"
  say "--initial-cluster=strata=http://$reach:$peer_port"
}

# torchrun's own etcd-v2 back end needs the old API, which servers up to 3.5 still have behind a flag.
v2_flag() { "$@" --help 2>&1 | grep -q -- '--enable-v2' && say "--enable-v2=true" || true; }

start() {
  if running; then
    say "etcd is already running at $reach:$port"
    return 0
  fi
  if healthy; then
    fail "another etcd, which this script did not start, already answers at $reach:$port" \
      "Use that one, or choose another port: ETCD_PORT=2479 ETCD_PEER_PORT=2480 $0 start"
  fi
  mkdir -p "$data_dir" || fail "cannot create $data_dir" "Choose another: ETCD_DATA_DIR=/path $0 start"
  if [[ -z $use_docker ]] && command -v "$binary" >/dev/null; then
    local flags
    mapfile -t flags < <(listen_flags "$host"; v2_flag "$binary")
    nohup "$binary" --data-dir="$data_dir/data" "${flags[@]}" >>"$log_file" 2>&1 </dev/null &
    local pid=$!
    say "$pid $(started_at "$pid")" >"$pid_file"
  elif command -v docker >/dev/null && docker info >/dev/null 2>&1; then
    local flags
    mapfile -t flags < <(listen_flags 0.0.0.0)
    docker rm -f "$container" >/dev/null 2>&1 || true
    docker run -d --name "$container" -p "$host:$port:$port" -v "$data_dir/data:/etcd-data" "$image" \
      /usr/local/bin/etcd --data-dir=/etcd-data "${flags[@]}" >/dev/null || fail "docker could not start $image"
  else
    fail "there is neither an etcd binary nor a Docker engine here" \
      "Debian, Ubuntu: apt-get install etcd-server" \
      "Or do without etcd: strata torchrun on one machine, or --rdzv-backend=strata with 'strata serve'"
  fi
  local deadline=$((SECONDS + timeout_s))
  until running && healthy; do
    if ! running; then
      tail -n 5 "$log_file" >&2 2>/dev/null || true
      rm -f "$pid_file"
      fail "etcd ended while starting; its last words are above" "Is port $port or $peer_port taken? lsof -i :$port -i :$peer_port"
    fi
    if ((SECONDS >= deadline)); then
      stop >/dev/null
      fail "etcd did not become healthy within $timeout_s s" "See its log: $0 logs"
    fi
    sleep 0.1
  done
  say "etcd is running at $reach:$port (data in $data_dir)"
}

stop() {
  local pid
  if pid=$(own_pid); then
    kill "$pid"
    local deadline=$((SECONDS + 10))
    while own_pid >/dev/null; do
      if ((SECONDS >= deadline)); then kill -9 "$pid" 2>/dev/null || true; fi
      sleep 0.05
    done
    rm -f "$pid_file"
    say "etcd is stopped"
  elif own_container; then
    docker stop "$container" >/dev/null && docker rm "$container" >/dev/null
    say "etcd is stopped"
  else
    rm -f "$pid_file"
    say "etcd is not running"
  fi
}

status() {
  if ! running; then
    if healthy; then
      say "an etcd that this script did not start answers at $reach:$port"
      return 0
    fi
    say "etcd is not running"
    return 3
  fi
  if healthy; then
    say "etcd is running and healthy at $reach:$port"
  else
    say "etcd is running at $reach:$port, but not healthy; see: $0 logs"
    return 1
  fi
}

logs() {
  if own_container; then docker logs "$@" "$container"
  elif [[ -f $log_file ]]; then tail -n 100 "$@" "$log_file"
  else fail "there is no log in $data_dir" "Has it ever been started? $0 start"
  fi
}

clean() {
  stop
  # Only what etcd wrote: the folder may be the user's own.
  rm -rf "$data_dir/data" "$log_file" "$pid_file"
  rmdir "$data_dir" 2>/dev/null || true
  say "everything etcd kept in $data_dir is removed"
}

case ${1:-} in
  start | stop | status | clean) "$1" ;;
  restart) stop; start ;;
  logs) shift; logs "$@" ;;
  -h | --help | help) sed -n '2,13s/^# \{0,1\}//p' "$0" ;;
  *) printf 'usage: %s start|stop|restart|status|logs [-f]|clean\n' "$0" >&2; exit 2 ;;
esac
