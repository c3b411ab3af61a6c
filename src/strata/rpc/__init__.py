"""Talking to a coordinator.

Training processes fork: PyTorch's loader processes come from one that has a session open. With gRPC's own fork support,
which is on by default, about every third such child crashes at its start; without it the child never touches gRPC. gRPC
looks at the variable when it is first imported, so everything here that imports gRPC imports this package before.

Nor may a child collect what its parent has left: a server or channel that ends in a process without gRPC's threads waits
for them for ever. So a child leaves everything it has inherited alone.
"""

import gc
import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.register_at_fork(after_in_child=gc.freeze)
