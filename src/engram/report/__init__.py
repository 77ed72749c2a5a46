"""The HTML page about tasks: one self-contained file, from Jinja2 templates.

`fit`, `sweep`, `eval` and the demo write it; nothing below this folder knows of it. Start in
`page.py`. The other modules make plain data (`contents.py`), which `templates/` turns into HTML.
"""
