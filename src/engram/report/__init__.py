"""The HTML page about tasks: one self-contained file, from templates.

`fit`, `sweep`, `eval` and the demo write it; nothing below this folder knows of it. Start in
`page.py`.
"""
