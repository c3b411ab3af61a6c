"""A process that is forked from one that uses gRPC never touches what it has inherited of it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import strata.rpc
import asyncio, gc, os, signal
import grpc.aio

class Cycle: pass

async def leave_a_server_to_the_collector():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    await channel.channel_ready()
    cycle = Cycle()
    cycle.itself, cycle.server, cycle.channel = cycle, server, channel

gc.disable()
asyncio.run(leave_a_server_to_the_collector())
child = os.fork()
if child == 0:
    signal.alarm(20)
    gc.collect()
    os._exit(0)
status = os.waitpid(child, 0)[1]
print("child", os.waitstatus_to_exitcode(status), flush=True)
os._exit(0)
"""


def test_a_forked_process_does_not_wait_for_a_server_that_its_parent_has_left() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout.strip() == "child 0", ran.stderr
