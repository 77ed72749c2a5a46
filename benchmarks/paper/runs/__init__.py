"""What is trained and measured; every finished run leaves a record.

`settings.py` is one row of a table on one dataset. `through_backbone.py` trains it with the whole
backbone in every step, `from_cache.py` from the backbone's stored outputs. `concatenation.py`,
`extension.py` and `costs.py` are experiments of their own. `datasets.py` has the images.
"""
