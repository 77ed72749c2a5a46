"""A model as one file for other programs: ONNX or torch.export, checked before it is kept.

The service and the command line import it; training does not know of it. Start in `write.py`.
"""
