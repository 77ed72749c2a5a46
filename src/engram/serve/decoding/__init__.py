"""Bodies are read and images decoded in a few processes, which are killed when they take too much.

A body or an image from a stranger can keep a parser busy for minutes, take all memory or crash it.
None of that reaches the service: `pool.py` sends the body to a process of `worker.py` and kills the
process at a limit on time. The processes read bodies with `upload.py` and `infer_body.py`, and
import neither torch nor the web framework, so that they are small and start at once.
"""
