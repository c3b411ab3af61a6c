"""Talking to a coordinator.

Training processes fork: PyTorch's loader processes come from one that has a session open. With gRPC's own fork support,
which is on by default, about every third such child crashes at its start; without it the child never touches gRPC. gRPC
looks at the variable when it is first imported, so everything here that imports gRPC imports this package before.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
