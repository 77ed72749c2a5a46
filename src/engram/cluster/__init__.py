"""More than one machine, on Ray: the same work as on one, divided among the nodes of a cluster.

`connect.py` starts Ray or joins a cluster, and says how many workers fit; everything else here
works inside `connected`. The command line imports this folder for `--on`; it imports the folders
that do the work on one machine, and their functions run unchanged on every node. Ray is an optional
package (the extra `cluster`), so only `connect.py` imports it, when it is asked to.
"""
