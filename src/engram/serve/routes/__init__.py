"""The endpoints, one module for each subject: predict, infer, tasks, operations.

Each makes an APIRouter that `app.py` includes. Next to them is what they share: their models
(`schemas.py`), the path from a body to outputs (`pipeline.py`), and the writing of answers
(`writing.py`). Start in `predict.py`.
"""
