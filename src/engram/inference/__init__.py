"""Answers of a model: evaluate a split, predict pictures, turn them into vectors.

Everything that answers goes through the `Engine` of `engine.py`: pixels and task names in, outputs
out. Training, export, reports and the service import this folder. Start in `predict.py`.
"""
