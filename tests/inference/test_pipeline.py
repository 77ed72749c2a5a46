"""`engram.pipeline` answers in the form, and with the numbers, of transformers' pipelines."""

from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import engram
from engram import EngramError, MemoryViT, load_backbone
from engram.images.preprocessing import Preprocessing


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def image(photos: Path) -> Path:
    return photos / "test" / "red" / "0.png"


def test_the_answers_are_those_of_transformers(assets: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = assets / "weights" / "vit_tiny_patch16_224" / "transformers"
    photos = sorted((assets / "data" / "pets" / "test").glob("*/*.jpg"))[::40][:3]
    theirs = transformers.pipeline("image-classification", model=str(folder), device="cpu")
    ours = engram.pipeline(MemoryViT(load_backbone(folder)), device="cpu", task="base")
    for given in (str(photos[0]), Image.open(photos[0]), [str(photo) for photo in photos]):
        expected, found = theirs(given, top_k=7), ours(given, top_k=7)
        assert type(found) is type(expected) is list
        for ours_here, theirs_here in zip(_flat(found), _flat(expected), strict=True):
            assert list(ours_here) == list(theirs_here) == ["label", "score"]
            assert ours_here["label"] == theirs_here["label"]
            assert ours_here["score"] == pytest.approx(theirs_here["score"], abs=1e-4)


def _flat(answers: Any) -> list[dict[str, Any]]:
    return answers if isinstance(answers[0], dict) else [row for one in answers for row in one]


def test_a_bundle_of_one_task_answers_as_predict_does(
    model: MemoryViT, image: Path, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "bundle")
    classify = engram.pipeline(tmp_path / "bundle", device="cpu")
    answer = classify(image)
    rows = engram.predict(model, image, device="cpu")["tasks"]["colours"]
    assert [row["label"] for row in answer] == [row["class"] for row in rows]
    assert [round(row["score"], 6) for row in answer] == [row["probability"] for row in rows]
    assert [row["label"] for row in classify(image, top_k=1)] == [rows[0]["class"]]
    assert len(classify(image, task="base", top_k=None)) == 7
    assert list(classify(image, task=["colours"])) == ["colours"]


def test_several_tasks_answer_by_name(model: MemoryViT, image: Path) -> None:
    model.add_task("tags", ["a", "b"], kind="multilabel")
    model.add_task("ages", ["old", "older"], kind="regression")
    classify = engram.pipeline(model, device="cpu")
    answer = classify(image)
    assert list(answer) == ["colours", "tags", "ages"]
    assert [row["label"] for row in answer["ages"]] == ["old", "older"]  # numbers keep their order
    assert answer["tags"] == classify(image, task="tags")
    with torch.no_grad():
        pixels = engram.images.normalise(
            torch.from_numpy(engram.images.evaluation_view(image, model.preprocessing))[None],
            model.preprocessing,
        )
        expected = model(pixels)["tags"][0].sigmoid().sort(descending=True).values
    assert torch.allclose(torch.tensor([row["score"] for row in answer["tags"]]), expected)


def test_what_is_given_decides_what_comes_back(model: MemoryViT, image: Path) -> None:
    classify = engram.pipeline(model, device="cpu", top_k=2)
    one, opened = classify(str(image)), Image.open(image)
    assert classify(opened) == classify(np.asarray(opened)) == one
    assert classify([image, opened]) == [one, one]
    assert classify(np.stack([np.asarray(opened)] * 2)) == [one, one]
    taken = []

    def stream() -> Iterator[Path]:
        for i in range(3):
            taken.append(i)
            yield image

    answers = classify(stream())
    assert next(answers) == one
    assert taken == [0]  # the rest is read when it is asked for
    assert list(answers) == [one, one]

    class Numbered(torch.utils.data.Dataset[Path]):  # it has no end of its own
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> Path:
            return image

    answers = classify(Numbered(), batch_size=2)
    assert next(answers)[0]["label"] == one[0]["label"]
    assert len(list(answers)) == 1


def test_an_image_comes_from_a_url(model: MemoryViT, image: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=image.parent))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        here = f"http://127.0.0.1:{server.server_address[1]}"
        classify = engram.pipeline(model, device="cpu")
        assert classify(f"{here}/0.png") == classify(image)
        with pytest.raises(EngramError, match=r"9.png: it cannot be downloaded \(.*404"):
            classify(f"{here}/9.png")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("resize", [None, 16])
def test_masks_have_the_size_of_the_image(
    model: MemoryViT, image: Path, resize: int | None
) -> None:
    model.backbone.preprocessing = Preprocessing((16, 16), resize)
    model.detach("colours")
    task = model.add_task("parts", ["sky", "sea", "sand"], kind="segmentation")
    torch.nn.init.normal_(task.head.weight)
    segments = engram.pipeline(model, device="cpu")(image)
    assert [list(one) for one in segments] == [["score", "label", "mask"]] * len(segments)
    masks = np.stack([np.asarray(one["mask"]) for one in segments])
    assert {one["mask"].mode for one in segments} == {"L"}
    assert {one["mask"].size for one in segments} == {(24, 20)}  # as the image
    assert set(np.unique(masks)) <= {0, 255}
    covered = (masks == 255).sum(0)
    if resize is None:  # the same as transformers' post_process_semantic_segmentation
        view = torch.from_numpy(engram.images.evaluation_view(image, model.preprocessing))
        with torch.no_grad():
            logits = model(engram.images.normalise(view[None], model.preprocessing))["parts"]
        expected = F.interpolate(logits, (20, 24), mode="bilinear")[0].argmax(0).numpy()
        found = [task.spec.classes.index(one["label"]) for one in segments]
        assert found == np.unique(expected).tolist()
        assert (masks == np.stack([(expected == c) * 255 for c in found])).all()
        assert (covered == 1).all()
    else:  # columns on both sides were cut off, and are in no mask
        assert covered.tolist() == [[0] + [1] * 20 + [0] * 3] * 20


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"task": "flowers"}, "There is no task 'flowers'"),
        ({"function_to_apply": "none"}, "does not take function_to_apply"),
    ],
)
def test_wrong_options_are_refused(
    model: MemoryViT, image: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(EngramError, match=sentence):
        engram.pipeline(model, device="cpu")(image, **options)


def test_what_is_no_image_is_refused(model: MemoryViT, photos: Path) -> None:
    classify = engram.pipeline(model, device="cpu")
    with pytest.raises(EngramError, match=r"empty\.png: the file is empty"):
        classify([photos / "test" / "red" / "0.png", photos / "test" / "red" / "empty.png"])
    with pytest.raises(EngramError, match="given as int"):
        classify(3)
    with pytest.raises(EngramError, match="given as dict"):
        classify({"image": 3})
    with pytest.raises(EngramError, match="no folder or file 'nowhere'"):
        engram.pipeline("nowhere")
    with pytest.raises(EngramError, match="together with a model"):
        engram.pipeline(model, backbone="pico")


def test_an_output_that_is_not_finite_is_refused(model: MemoryViT, photos: Path) -> None:
    torch.nn.init.constant_(model.task("colours").head.weight, float("inf"))
    with pytest.raises(EngramError, match="'colours' is not finite"):
        engram.pipeline(model, device="cpu")(photos / "test" / "red" / "0.png")
