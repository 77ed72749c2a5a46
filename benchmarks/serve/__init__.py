"""Benchmarks of the HTTP service and its engines.

`engines` compares ONNX engines with PyTorch, `soak` puts the service under load, `batch_effect`
measures how an int8 answer depends on its batch. `malformed` makes the invalid requests that `soak`
and the tests send.
"""
