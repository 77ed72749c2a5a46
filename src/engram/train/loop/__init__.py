"""The training loop: `training.py` takes the steps of `task_trainer.py`, validates, checkpoints.

`validation.py` estimates how good a task is, `image_statistics.py` keeps what familiarity needs,
`trainable.py` says what learns; `bank.py` fills the memory of tasks that see good images alone.
"""
