"""Many trainings from one file: what each job is, in which order they run, what became of them.

Only the command line and `cluster` import it. Start in `farm.py`: `run_farm` reads the jobs
(`jobs.py`), checks all of them before anything trains (`plan.py`), lets a runner work through them
(`schedule.py`; `local.py` has processes of this machine) and keeps what they made (`results.py`).
"""
