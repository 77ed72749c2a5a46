"""Work on a Ray cluster of three nodes on this machine, against the same work in one process.

`nodes.py` starts the cluster and finds its processes. Each kind of work is a module of its own that
is run by itself, loses a node and an actor on the way, and writes one page of results.
"""
