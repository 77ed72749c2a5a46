"""The endpoints, one module for each subject: predictions, infer, tasks, operations.

Each makes an APIRouter that `app.py` includes. Next to them is what they share: their models
(`schemas.py`), the path from a body to outputs (`request_pipeline.py`), and the writing of answers
(`writing.py`). Start in `predictions.py`.
"""
