"""The speed of tasks beside every peer, measured in one run: see __main__.py."""
