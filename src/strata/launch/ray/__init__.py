"""Tasks over a Ray cluster.

`launcher` runs in the coordinator and imports no Ray; `driver` is its own process, the only client of the cluster; `run` is
one task there, `agent` one actor on one node. `placement` decides how many workers a node gets.
"""
