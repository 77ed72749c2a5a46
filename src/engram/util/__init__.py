"""Small helpers that know nothing of tasks or models: files, text, progress, processes, the Hub.

Everything above may import them. Each module stands alone.
"""
