"""What a task is: its spec, its regime, its kind, its head, its metrics and its costs.

Everything from `data` upwards may import it; it knows the trunk's shape and no files. Start in
`spec.py`.
"""
