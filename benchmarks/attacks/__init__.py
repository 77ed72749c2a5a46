"""Hostile files, pictures, requests and kills: what Engram survives.

`python -m benchmarks.attacks` runs the sections, one module each: `headers`, `backbones`,
`pictures`, `http`, `v2`, `connections`, `kills`, `bulk`, `archives`, `lists`, `load` and `soak`.
`record` is what a section counts, `isolated` runs cases in processes with a limit of time and
memory, `jobs` runs `engram predict --out`, `service` runs `engram serve`, and `health` watches it
while it is attacked. Nothing leaves the machine: requests go over loopback only.
"""
