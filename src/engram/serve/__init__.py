"""The HTTP service: every task of a bundle, in one pass, with a page to try it.

Only the command line imports it. Start in `app.py` (the endpoints) and `catalogue.py` (how tasks
come and go while requests are answered).
"""
