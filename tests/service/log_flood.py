"""Workers that log so many seconds' worth of lines, a given number a second, in a process of their own.

`python -m tests.service.log_flood ADDRESS SESSIONS LINES_PER_SECOND SECONDS` prints how many lines were sent, all
together, once the coordinator has taken the last of them.
"""

from __future__ import annotations

import sys
import time

import grpc

from strata.rpc import coordinator_pb2 as pb
from tests.service.clients import RawSession, channel, stub

BATCH = 100


def main() -> None:
    address, sessions, per_second, seconds = sys.argv[1], *map(int, sys.argv[2:])
    text = "step 1000: loss 3.1415, lr 1.00e-03, 12345 tokens/s, a line of ordinary length"
    with stub(address) as calls, channel(address) as opened:
        names = [f"chatty-{n}" for n in range(sessions)]
        for name in names:
            calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id=name, job_id="chatty"))
        talkers = [RawSession(opened).hello(name) for name in names]
        for talker in talkers:
            talker.wait_for("welcome", within_s=30)
        print("under way", flush=True)
        began_s, sent, total = time.monotonic(), 0, per_second * seconds
        while sent < total:  # All of them, also where that takes longer than it should.
            due = min(total, (time.monotonic() - began_s) * per_second)
            while sent < due:
                now_s = time.time()
                lines = [
                    pb.LogEntry(timestamp=now_s, level="info", message=f"{text} {sent + n}")
                    for n in range(BATCH)
                ]
                talkers[(sent // BATCH) % sessions].send(logs=pb.LogBatch(entries=lines))
                sent += BATCH
            for talker in talkers:
                talker.send(heartbeat=pb.HeartbeatRequest())
            time.sleep(0.02)
        for talker in talkers:
            talker.send(goodbye=pb.Goodbye(reason="said enough"))
        for talker in talkers:
            assert talker.ended.wait(60), "a goodbye was not answered"
            assert talker.error is None or talker.error.code() == grpc.StatusCode.OK, talker.error
        print(sent, flush=True)


if __name__ == "__main__":
    main()
