"""Small helpers that know nothing of tasks or models: files, text, processes, optional packages.

Everything above may import them. Each module stands alone. `page/` has what the page of the service
and the exported page share.
"""
