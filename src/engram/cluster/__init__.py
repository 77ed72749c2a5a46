"""Many trainings, and more than one machine: `engram farm`, and `engram predict --on`.

The command line alone imports it. `farm.py` trains the jobs of a file, which are
checked before anything trains (`jobs.py`), with processes of this machine or tasks of Ray
(`trainers.py`). `bulk.py` answers batches of images with actors of Ray. `connect.py` starts Ray, or
joins a cluster; Ray is the optional extra `cluster`.
"""
