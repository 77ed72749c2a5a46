"""The HTTP service: runs all tasks of a bundle on uploaded images, and has a page to try them.

Only the command line imports it. Start in `app.py`, which puts the service together; `routes/` has
the endpoints, `catalogue.py` how tasks are attached and removed while requests are answered, and
`batching.py` how requests share forward passes.
"""
