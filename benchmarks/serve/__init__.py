"""Benchmarks of the HTTP service and its engines.

`engines` compares ONNX engines with PyTorch, `soak` puts the service under load, `int8` measures
the accuracy of int8 on photographs. `malformed` makes the invalid requests that `soak`
and the tests send.
"""
