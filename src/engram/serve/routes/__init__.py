"""The endpoints, one module for each subject: predict, tasks, operations, pages.

Each makes an APIRouter that `app.py` includes. Next to them is what they share: reading requests
(`uploads.py`), their models (`schemas.py`), error responses (`openapi.py`). Start in `predict.py`.
"""
