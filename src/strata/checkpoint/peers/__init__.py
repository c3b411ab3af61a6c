"""Copies of a machine's images in other machines' memory, so that a lost machine loses no snapshot.

`memory` is the part in each machine's agent, which outlives its workers: it keeps copies for others, sends this machine's images
(`sending`), and answers reads. `link` is the part in a worker: it reports each snapshot, and finds copies again. `wire` is how
they speak. Who gets what, and what an agent accepts, is decided by `strata.core.jobs.peers`.

A copy is an image's bytes and its mark, like any image in memory, and exists from the moment its mark does: the bytes come first,
each chunk verified by the digest in the manifest. Training waits for none of it.
"""
