"""Where labelled pictures come from: folders, tables, arrays, masks, the Hub.

Everything from `store` upwards may import it. Start in `datasets.py`: `load` finds the source and
gives `Splits` of `Dataset`s; `loader.py` reads them in batches.
"""
