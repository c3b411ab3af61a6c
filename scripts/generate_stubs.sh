#!/usr/bin/env bash
# Regenerates src/strata/rpc/coordinator_pb2* from proto/. The results are committed, so that users need no protoc.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(dirname "${PYTHON:-.venv/bin/python}")
"$bin/python" -m grpc_tools.protoc -Iproto --python_out=src --pyi_out=src --grpc_python_out=src \
  proto/strata/rpc/coordinator.proto
# The generator demands a grpcio as new as itself. What it writes needs only `_registered_method`, which came with 1.63;
# 1.80 is the oldest that was tried.
sed -i 's/^GRPC_GENERATED_VERSION = .*/GRPC_GENERATED_VERSION = "1.80.0"/' src/strata/rpc/coordinator_pb2_grpc.py
"$bin/ruff" format --quiet src/strata/rpc/coordinator_pb2.py src/strata/rpc/coordinator_pb2_grpc.py
