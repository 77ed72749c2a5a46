"""What is trained and measured; every finished run leaves a record.

`settings.py` is one row of a table on one dataset. `through_trunk.py` trains it with the whole
trunk in every step, `from_cache.py` from the trunk's stored outputs. `concatenation.py`,
`extension.py` and `costs.py` are experiments of their own. `datasets.py` has the images.
"""
