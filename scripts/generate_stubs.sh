#!/usr/bin/env bash
# Regenerates src/strata/rpc/coordinator_pb2* from proto/. The results are committed, so that users need no protoc.
set -euo pipefail
cd "$(dirname "$0")/.."
"${PYTHON:-.venv/bin/python}" -m grpc_tools.protoc -Iproto --python_out=src --pyi_out=src --grpc_python_out=src \
  proto/strata/rpc/coordinator.proto
