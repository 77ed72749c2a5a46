"""The Open Inference Protocol, asked by NVIDIA's own client and by hand."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.http as triton
from fastapi.testclient import TestClient
from tests.support.serving import AUTH, Launch, Opened, Server, World, picture, put
from tritonclient.utils import InferenceServerException

from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.store.compose import compose


@pytest.fixture(scope="module")
def serving(world: World, launch: Launch) -> Iterator[Server]:
    server = launch(world.bundle)
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture
def client(serving: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(serving.url.removeprefix("http://")) as client:
        yield client


def encoded(*pictures: bytes, binary: bool = True) -> triton.InferInput:
    tensor = triton.InferInput("image", [len(pictures)], "BYTES")
    given = pictures if binary else [base64.b64encode(one) for one in pictures]
    tensor.set_data_from_numpy(np.array(given, dtype=object), binary_data=binary)
    return tensor


def stack_views(world: World, data: bytes) -> torch.Tensor:
    preprocessing = world.model.preprocessing
    view = torch.from_numpy(evaluation_view(data, preprocessing))
    return normalise(view[None], preprocessing)


# NVIDIA's client


def test_tritons_client_finds_the_server_and_its_models(
    client: triton.InferenceServerClient, world: World
) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data", "classification"]
    for name in ("first", "second", "bundle"):
        assert client.is_model_ready(name)
    assert not client.is_model_ready("nobody")
    about = client.get_model_metadata("bundle")
    assert [one["name"] for one in about["inputs"]] == ["image", "pixel_values"]
    assert about["inputs"][1]["shape"] == [-1, 3, *world.model.preprocessing.size]
    shapes = {one["name"]: one["shape"] for one in about["outputs"]}
    assert shapes["first"] == [-1, 2]
    assert shapes["second"] == [-1, 3]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tritons_client_gets_the_models_outputs(
    client: triton.InferenceServerClient, world: World, binary_in: bool, binary_out: bool
) -> None:
    pictures = [picture(i) for i in range(3)]
    outputs = [triton.InferRequestedOutput(n, binary_data=binary_out) for n in ("second", "first")]
    answer = client.infer(
        "bundle", [encoded(*pictures, binary=binary_in)], outputs=outputs, request_id="seven"
    )
    assert answer.get_response()["id"] == "seven"
    for name in ("first", "second"):
        expected = torch.stack([world.logits(one, name)[name] for one in pictures])
        assert np.allclose(answer.as_numpy(name), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("binary", [True, False])
def test_pixels_give_the_same_outputs_as_the_image(
    client: triton.InferenceServerClient, world: World, binary: bool
) -> None:
    given = stack_views(world, picture(5)).numpy()
    tensor = triton.InferInput("pixel_values", list(given.shape), "FP32")
    tensor.set_data_from_numpy(given, binary_data=binary)
    answer = client.infer("first", [tensor])
    same = client.infer("first", [encoded(picture(5))])
    assert np.allclose(answer.as_numpy("first"), same.as_numpy("first"), atol=1e-5)


def test_the_classification_extension_gives_names(
    client: triton.InferenceServerClient, world: World
) -> None:
    outputs = [triton.InferRequestedOutput("second", class_count=2)]
    answer = client.infer("second", [encoded(picture(1), picture(2))], outputs=outputs)
    labels = answer.as_numpy("second")
    assert labels.shape == (2, 2)
    probabilities = world.logits(picture(2), "second")["second"].softmax(0)
    best = int(probabilities.argmax())
    value, index, name = labels[1, 0].decode().split(":", 2)
    assert (int(index), name) == (best, f"second <b>{best}</b>")
    assert float(value) == pytest.approx(float(probabilities[best]), abs=1e-5)


def test_a_version_is_the_content_and_no_other_is_served(
    client: triton.InferenceServerClient, world: World
) -> None:
    [version] = client.get_model_metadata("first")["versions"]
    answer = client.infer("first", [encoded(picture(1))], model_version=version)
    assert answer.get_response()["model_version"] == version
    assert client.is_model_ready("first", version)
    with pytest.raises(InferenceServerException, match=f"has the version {version}, and no other"):
        client.infer("first", [encoded(picture(1))], model_version="7")


def test_mistakes_are_sentences_in_tritons_client(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="There is no model 'nobody'"):
        client.infer("nobody", [encoded(picture(1))])
    with pytest.raises(InferenceServerException, match="image 2: not an image"):
        client.infer("first", [encoded(picture(1), b"no image")])
    outputs = [triton.InferRequestedOutput("second")]
    with pytest.raises(InferenceServerException, match="'first' has no output 'second'"):
        client.infer("first", [encoded(picture(1))], outputs=outputs)
    wrong = triton.InferInput("pixel_values", [1, 3, 2, 2], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 3, 2, 2), np.float32))
    with pytest.raises(InferenceServerException, match=r"send FP32 \[n, 3, 16, 16\]"):
        client.infer("first", [wrong])


@pytest.fixture(scope="module")
def segmenting(
    world: World, launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A service with a segmentation, whose answers may have the values of three of its logits."""
    folder = tmp_path_factory.mktemp("segmenting") / "bundle"
    compose([world.engrams["segmentation"], world.engrams["first"]], folder)
    server = launch(folder, "--max-values", str(3 * 3 * 16 * 16))
    yield server
    server.stop(signal.SIGKILL)


@pytest.mark.parametrize("binary", [True, False])
def test_a_segmentation_answers_masks_and_logits_on_request(
    segmenting: Server, world: World, binary: bool
) -> None:
    pictures = [picture(i) for i in range(2)]
    expected = torch.stack([world.logits(one, "segmentation")["segmentation"] for one in pictures])
    with triton.InferenceServerClient(segmenting.url.removeprefix("http://")) as client:
        about = {one["name"]: one for one in client.get_model_metadata("segmentation")["outputs"]}
        assert about["segmentation"]["datatype"] == "UINT8"
        assert about["segmentation:logits"]["shape"] == [-1, 3, 16, 16]
        plain = client.infer("segmentation", [encoded(*pictures)])
        names = ("segmentation:logits", "segmentation")
        outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
        both = client.infer("segmentation", [encoded(pictures[0])], outputs=outputs)
    mask = plain.as_numpy("segmentation")
    assert (mask.dtype, mask.shape) == (np.uint8, (2, 16, 16))
    assert (mask == expected.argmax(1).numpy()).mean() > 0.99
    assert [one["name"] for one in plain.get_response()["outputs"]] == ["segmentation"]
    assert np.allclose(both.as_numpy("segmentation:logits"), expected[:1].numpy(), atol=1e-5)
    assert (both.as_numpy("segmentation") == mask[:1]).all()


def test_outputs_in_json_and_as_bytes_mix(segmenting: Server, world: World) -> None:
    outputs = [
        triton.InferRequestedOutput("segmentation", binary_data=False),
        triton.InferRequestedOutput("first", binary_data=True, class_count=2),
        triton.InferRequestedOutput("segmentation:logits", binary_data=True),
    ]
    with triton.InferenceServerClient(segmenting.url.removeprefix("http://")) as client:
        answer = client.infer("bundle", [encoded(picture(1))], outputs=outputs)
    logits = world.logits(picture(1), "segmentation")["segmentation"].numpy()
    assert np.allclose(answer.as_numpy("segmentation:logits")[0], logits, atol=1e-5)
    assert answer.as_numpy("segmentation").shape == (1, 16, 16)
    assert answer.as_numpy("first").shape == (1, 2)


def test_an_answer_has_no_more_values_than_the_limit(segmenting: Server) -> None:
    outputs = [triton.InferRequestedOutput("segmentation:logits")]
    pictures = [picture(i) for i in range(4)]
    with triton.InferenceServerClient(segmenting.url.removeprefix("http://")) as client:
        client.infer("segmentation", [encoded(*pictures[:3])], outputs=outputs)
        with pytest.raises(InferenceServerException, match="3,072 values"):
            client.infer("segmentation", [encoded(*pictures)], outputs=outputs)
        client.infer("segmentation", [encoded(*pictures)])  # as masks


# By hand


def ask(client: TestClient, document: object, model: str = "first", **more: Any) -> httpx.Response:
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    return client.post(f"/v2/models/{model}/infer", content=content, **more)


def image(data: object = None, shape: tuple[int, ...] = (1,), **fields: Any) -> dict[str, Any]:
    texts = [base64.b64encode(picture(1)).decode()] if data is None else data
    tensor = {"name": "image", "shape": list(shape), "datatype": "BYTES", "data": texts, **fields}
    return {"inputs": [tensor]}


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (b"{", "is not JSON"),
        ({"inputs": []}, "at 'inputs'"),
        (image(["???"]), "image 1 is not valid base64"),
        (image(shape=(2,)), "image has the shape [2]"),
        (image(shape=(1, 2)), "at least one image"),
        (image([], (0,)), "at least one image"),
        (image(datatype="FP32"), "has the datatype FP32 and the shape [1]"),
        (image(name="picture"), "Input should be 'image' or 'pixel_values'"),
        (image(parameters={"binary_data_size": 4}), "either data or binary_data_size"),
        (
            {"inputs": [{"name": "pixel_values", "shape": [1, 3, 16, 16], "datatype": "FP32",
                         "data": [1, [2]]}]},
            "are not the 768 numbers",
        ),
        (
            {"inputs": [{"name": "pixel_values", "shape": [1, 3, 16, 16], "datatype": "FP32",
                         "data": [1e39] * 768}]},
            "has values that are not finite",
        ),
    ],
)  # fmt: skip
def test_a_wrong_request_is_a_sentence(opened: Opened, document: object, sentence: str) -> None:
    response = ask(opened(), document)
    assert response.status_code in (400, 422), response.text
    assert sentence in response.json()["error"]


def test_binary_tensors_that_do_not_fit_are_sentences(opened: Opened) -> None:
    client, size = opened(), "Inference-Header-Content-Length"
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES"}
    for given, rest, length, sentence in (
        (4, b"\1\0\0\0", None, "end inside an image"),
        (9, b"\1\0\0\0", None, "4 bytes follow the JSON"),
        (0, b"", "9999", "and the body has"),
        (0, b"", "x", "number of bytes"),
    ):
        head = {"inputs": [{**tensor, "parameters": {"binary_data_size": given}}]}
        text = json.dumps(head).encode()
        response = ask(client, text + rest, headers={size: length or str(len(text))})
        assert response.status_code in (400, 422)
        assert sentence in response.json()["error"]


def test_outputs_that_json_cannot_hold_are_an_error_and_bytes_are_not(
    opened: Opened, world: World
) -> None:
    client = opened()
    assert put(client, world, "wild").status_code == 201
    response = ask(client, image(), "wild")
    assert response.status_code == 422
    assert "not finite" in response.json()["error"]
    binary = {**image(), "parameters": {"binary_data_output": True}}
    assert ask(client, binary, "wild").status_code == 200


def test_only_a_classification_has_most_likely_classes(opened: Opened, world: World) -> None:
    client = opened()
    put(client, world, "regression")
    outputs = [{"name": "regression", "parameters": {"classification": 2}}]
    response = ask(client, {**image(), "outputs": outputs}, "regression")
    assert response.status_code == 422
    assert "is no classification" in response.json()["error"]


def test_an_output_is_asked_for_once(opened: Opened) -> None:
    response = ask(opened(), {**image(), "outputs": [{"name": "first"}] * 2})
    assert response.status_code == 422
    assert "'first' is asked for twice" in response.json()["error"]


def test_asking_needs_the_token_and_health_does_not(opened: Opened) -> None:
    client = opened(ask_token="ask")
    assert ask(client, image()).status_code == 401
    assert ask(client, image(), headers=AUTH).status_code == 200
    assert client.get("/v2/models/first").status_code == 401
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2").json()["name"] == "engram"


def test_a_request_has_no_more_images_than_the_limit(opened: Opened) -> None:
    text = base64.b64encode(picture(1)).decode()
    response = ask(opened(max_images=2), image([text] * 3, (3,)))
    assert response.status_code == 422
    assert "2 images at most" in response.json()["error"]
