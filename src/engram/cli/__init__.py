"""The commands: parse flags, call one function, print the result.

Nothing imports this folder. Start in `main.py`, which turns every failure into a sentence and an
exit code; each other module holds the commands of one job.
"""
