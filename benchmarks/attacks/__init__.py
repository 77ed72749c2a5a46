"""Hostile files, pictures, requests and kills: what Engram survives.

`python -m benchmarks.attacks` runs the sections, one module each: `headers`, `trunks`, `pictures`,
`http`, `kills` and `load`. `record` is what a section counts, `isolated` runs cases in processes
with a limit of time and memory, `service` runs `engram serve`, and `health` watches it while it is
attacked. Nothing leaves the machine: requests go over loopback only.
"""
