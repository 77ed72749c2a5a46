"""Look at images before and after training: what is wrong with them, and which to label next.

`check`, `suggest` and `drift` are here. They work on the features that training caches, so that
looking first costs no second pass of the backbone. Only the command line and experiments import it.
"""
