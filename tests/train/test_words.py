"""Words as classes: the logits are those of zero-shot classification by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from tests.support.backbones import TEXT, VIT, randomised

import engram
from engram import EngramError, MemoryViT
from engram.cli import main
from engram.export.write import export_onnx
from engram.images.preprocessing import Preprocessing
from engram.inference.engine import load_model
from engram.store.format import read_engram
from engram.train.words import add_words, parse_words

PROMPTS = ["a photo of a cat", "a drawing of a cat", "a photo of a dog", "red flower"]
WORDS = {"cat": PROMPTS[:2], "dog": [PROMPTS[2]], "flower": [PROMPTS[3]]}


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words, with an end token that has the largest number, as CLIP's."""
    words = sorted({word for prompt in PROMPTS for word in prompt.split()})
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", *words, "<end>"])}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", vocabulary["<end>"])]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", unk_token="<unk>", eos_token="<end>"
    ).save_pretrained(folder)


def two_towers(family: str, folder: Path) -> Any:
    """A small random model with both towers and a tokenizer, in a folder."""
    text = {**TEXT, "max_position_embeddings": 8}
    if family == "clip":
        config = transformers.CLIPConfig(text_config=text, vision_config=VIT, projection_dim=24)
        model = randomised(transformers.CLIPModel(config))
    else:  # the texts of a SigLIP are as wide as its images
        text["projection_size"] = VIT["hidden_size"]
        config = transformers.SiglipConfig(text_config=text, vision_config=VIT)
        model = randomised(transformers.SiglipModel(config))
        with torch.no_grad():
            model.logit_bias.fill_(-3.0)
    with torch.no_grad():
        model.logit_scale.fill_(2.0)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


@pytest.fixture(scope="module", params=["clip", "siglip"])
def towers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, two_towers(request.param, folder)


def their_logits(family: str, folder: Path, model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The zero-shot logits of transformers for every prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    padding = {"padding": True} if family == "clip" else {"padding": "max_length", "max_length": 8}
    tokens = tokenizer(PROMPTS, return_tensors="pt", **padding)
    given = dict(tokens) if family == "clip" else {"input_ids": tokens["input_ids"]}
    given.pop("token_type_ids", None)
    with torch.inference_mode():
        return model(pixel_values=pixels, **given).logits_per_image.clone()


def pixels_for(model: MemoryViT, images: int = 3) -> torch.Tensor:
    return torch.rand(images, 3, *model.backbone.config.image_size)


def test_logits_are_those_of_transformers(towers: Any, tmp_path: Path) -> None:
    family, folder, theirs = towers
    model = MemoryViT(engram.load_backbone(folder)).eval()
    vision = engram.load_backbone(folder).fingerprint
    add_words(model, "words", {prompt: [prompt] for prompt in PROMPTS})
    pixels = pixels_for(model)
    expected = their_logits(family, folder, theirs, pixels)
    with torch.inference_mode():
        found = model(pixels)["words"]
        vectors = model.embed(pixels, ["words"])["words"]
    assert torch.allclose(found, expected, atol=1e-5, rtol=0)
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3), atol=1e-6)
    # The file holds the words, and the text tower is needed no more.
    path = model.save("words", tmp_path / "words.safetensors")
    assert read_engram(path).backbone.fingerprint == vision
    for tower in ("text_model", "text_projection"):
        assert not any(tower in name for name in read_engram(path).tensors)
    with torch.inference_mode():
        assert torch.equal(load_model(path)(pixels)["words"], found)
        assert torch.allclose(load_model(path)(pixels, exact=True)["words"], expected, atol=1e-5)


def test_several_texts_of_a_class_are_averaged_as_unit_vectors(towers: Any) -> None:
    _, folder, theirs = towers
    model = MemoryViT(engram.load_backbone(folder)).eval()
    single = add_words(model, "single", {prompt: [prompt] for prompt in PROMPTS}).head.weight
    several = add_words(model, "several", WORDS).head.weight
    scale = float(theirs.logit_scale.detach().exp())
    mean = F.normalize((single[0] + single[1]) / 2, dim=0) * scale
    assert torch.allclose(several[0], mean, atol=1e-4)
    assert torch.allclose(several[1:], single[2:], atol=1e-4)


def test_an_exported_file_answers_the_same(towers: Any, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    family, folder, theirs = towers
    model = MemoryViT(engram.load_backbone(folder)).eval()
    add_words(model, "words", {prompt: [prompt] for prompt in PROMPTS})
    export_onnx(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    pixels = pixels_for(model)
    (name,) = (one.name for one in session.get_inputs())
    outputs = dict(
        zip(
            (one.name for one in session.get_outputs()),
            session.run(None, {name: pixels.numpy()}),
            strict=True,
        )
    )
    expected = their_logits(family, folder, theirs, pixels).numpy()
    assert np.abs(outputs["words"] - expected).max() < 1e-4


def test_probabilities_of_each_class_by_itself_need_a_siglip(towers: Any) -> None:
    family, folder, theirs = towers
    model = MemoryViT(engram.load_backbone(folder)).eval()
    words = {prompt: [prompt] for prompt in PROMPTS}
    if family == "clip":
        with pytest.raises(EngramError, match="multilabel"):
            add_words(model, "words", words, kind="multilabel")
        return
    task, pixels = add_words(model, "words", words, kind="multilabel"), pixels_for(model, 1)
    with torch.inference_mode():
        output = model(pixels)["words"][0]
    expected = their_logits(family, folder, theirs, pixels)[0].sigmoid()
    found = {row["class"]: row["probability"] for row in task.answer(output, 4)}
    assert [found[prompt] for prompt in PROMPTS] == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_task_attaches_only_where_the_embedding_is_the_same(
    towers: Any, tmp_path: Path
) -> None:
    """A CLIP's projection is no part of the backbone's fingerprint."""
    family, folder, _ = towers
    model = MemoryViT(engram.load_backbone(folder))
    add_words(model, "words", WORDS)
    path = model.save("words", tmp_path / "words.safetensors")
    other = engram.load_backbone(folder)
    with torch.no_grad():
        next(other.head.parameters()).mul_(2)  # type: ignore[union-attr]
    assert (other.fingerprint == model.backbone.fingerprint) == (family == "clip")
    with pytest.raises(EngramError, match="embedding" if family == "clip" else "was trained on"):
        MemoryViT(other).attach(path)
    other.head = None
    with pytest.raises(EngramError, match="no head" if family == "clip" else "was trained on"):
        MemoryViT(other).attach(path)


def coloured(folder: Path, each: int) -> Path:
    rng = np.random.default_rng(0)
    for i, label in enumerate(WORDS):
        (folder / label).mkdir(parents=True)
        for j in range(each):
            pixels = rng.integers(0, 90, (20, 20, 3), dtype=np.uint8)
            pixels[..., i] += 150
            Image.fromarray(pixels).save(folder / label / f"{j}.png")
    return folder


@pytest.fixture
def run(towers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    _, folder, _ = towers

    def call(*given: object) -> int:
        return main.main([*map(str, given), "--backbone", str(folder)])

    return call


def test_the_command_makes_a_task_without_an_image_and_with_few(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("words.txt").write_text("\n".join(f"{t}={c}" for c, ts in WORDS.items() for t in ts))
    assert run("fit", "--words", "words.txt", "--task", "a", "-o", "a.safetensors", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["task"]["regime"], made["task"]["classes"]) == ("cosine-head", list(WORDS))
    assert read_engram("a.safetensors").recipe["words"] == WORDS
    photos = coloured(tmp_path / "photos", each=4)
    flags = ("--words", "words.txt", "--workers", 0, "--task", "b", "-o", "b.safetensors")
    assert run("fit", photos, *flags, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    before, after = (read_engram(f"{name}.safetensors") for name in "ab")
    assert after.recipe["words"] == WORDS
    assert not torch.equal(before.tensors["head.weight"], after.tensors["head.weight"])
    model = load_model("b.safetensors")
    measured = engram.evaluate(model, photos, task="b", workers=0)
    assert measured["accuracy"] == 1.0, said  # of the images it learned from
    # Text and images are in one space.
    texts = ("--text", PROMPTS[0], "--text", PROMPTS[2])
    assert run("embed", *texts, "-o", "texts.npz") == 0
    with np.load("texts.npz") as found:
        assert list(found["path"]) == [PROMPTS[0], PROMPTS[2]]
        dog = torch.from_numpy(found["text"][1])
    weight = before.tensors["head.weight"][1]
    assert torch.allclose(F.normalize(weight, dim=0), dog, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--words", "cat,dog", "--regime", "masked"), "--regime cannot be given"),
        (("--words", "a photo of a cat="), "TEXT=CLASS"),
        (("--words", " , "), "no words"),
        ((), "nothing to learn from"),
    ],
)
def test_what_makes_no_task_is_said(
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    given: tuple[str, ...],
    sentence: str,
) -> None:
    assert run("fit", *given, "--task", "t", "-o", "t.safetensors") == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not Path("t.safetensors").exists()


def test_a_backbone_without_a_text_tower_is_refused(tmp_path: Path) -> None:
    backbone = engram.random_backbone(image_size=16, patch=8, width=16, depth=1, heads=2, classes=3)
    backbone.preprocessing = Preprocessing((16, 16), None)
    model = MemoryViT(engram.load_backbone(engram.save_backbone(backbone, tmp_path / "vit")))
    with pytest.raises(EngramError, match="no text tower"):
        add_words(model, "words", WORDS)


def test_words_are_parsed() -> None:
    assert parse_words("a photo of a cat=cat, dog , one=two=cat") == {
        "cat": ["a photo of a cat", "one=two"],
        "dog": ["dog"],
    }
