"""Requests of the Open Inference Protocol: what is asked for, and how it is sent."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engram.serve.schemas import InferOutput, InferRequest

IMAGE: dict[str, Any] = {"name": "image", "shape": [1], "datatype": "BYTES", "data": ["eA=="]}


def test_an_output_may_be_binary_where_the_request_is_not() -> None:
    outputs = [{"name": "a", "parameters": {"binary_data": True}}, {"name": "b"}]
    options = InferRequest.model_validate({"inputs": [IMAGE], "outputs": outputs})
    assert options.outputs is not None
    assert [options.wants_binary(output) for output in options.outputs] == [True, False]
    everything = {"inputs": [IMAGE], "parameters": {"binary_data_output": True}}
    assert InferRequest.model_validate(everything).wants_binary(InferOutput(name="a"))


def test_fields_for_other_servers_are_ignored() -> None:
    given = {"inputs": [{**IMAGE, "parameters": {"content_type": "base64"}}], "priority": 3}
    assert InferRequest.model_validate(given).outputs is None


@pytest.mark.parametrize("inputs", [[], [IMAGE, IMAGE], [{**IMAGE, "data": None}]])
def test_there_is_one_input_with_one_source(inputs: list[Any]) -> None:
    with pytest.raises(ValidationError):
        InferRequest.model_validate({"inputs": inputs})
