"""Many trainings, and more than one machine: `engram farm`, and `engram predict --on`.

`farm.py` trains the jobs of a file (`jobs.py`) with processes or tasks of Ray (`trainers.py`);
`bulk.py` answers batches of images with actors of Ray, which `connect.py` starts or joins.
"""
