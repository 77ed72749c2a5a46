"""The speed of Engram compared with other methods, all measured in one run.

`__main__.py` is the command line, `plan.py` the sizes, `measure.py` and `growth.py` the sections.
`page.py`, `plots.py` and `scale.py` write the results from the measured numbers.
"""
