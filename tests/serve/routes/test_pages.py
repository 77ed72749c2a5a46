"""The page in a real browser: upload, answers, overlay, a bad file, a task that comes meanwhile."""

from __future__ import annotations

import io
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from tests.support.engrams import familiar
from tests.support.serving import AUTH, TOKEN, Launch, Server, World, picture
from tests.support.waiting import FUSE
from tests.support.web import BRIGHTNESS

from engram import MemoryViT, load_backbone, random_backbone, save_backbone
from engram.images.preprocessing import Preprocessing
from engram.store.compose import compose
from engram.store.format import read_engram, serialise_engram

SIZES = {"desktop": (1280, 900), "phone": (360, 780)}


@pytest.fixture(scope="module")
def service(
    world: World, launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = shutil.copytree(world.bundle, tmp_path_factory.mktemp("page") / "bundle")
    server = launch(folder)
    yield server
    server.stop(signal.SIGKILL)


class Seen:
    """A page, and what it writes to the console and fetches from elsewhere."""

    def __init__(
        self,
        browser: Any,
        url: str,
        size: str = "desktop",
        scheme: str = "light",
        ready: str = ".card",
    ):
        width, height = SIZES[size]
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * FUSE)
        self.console: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", self._requested)
        self.url = url
        self.page.goto(url)
        self.page.wait_for_selector(ready)

    def _requested(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.elsewhere.append(request.url)

    def upload(self, data: bytes, name: str = "a.png", kind: str = "image/png") -> None:
        file = {"name": name, "mimeType": kind, "buffer": data}
        self.page.set_input_files("#file", files=[file])

    def answer(self, task: str) -> Any:
        return self.page.locator(f"[data-task='{task}'] .answer")

    def refresh(self) -> None:
        """Let the page ask for the tasks now, as it does by itself every two seconds."""
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def seen(browser: Any, service: Server) -> Iterator[Seen]:
    seen = Seen(browser, service.url)
    yield seen
    seen.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_upload_answers_and_overlay(
    browser: Any, service: Server, world: World, size: str, scheme: str
) -> None:
    seen = Seen(browser, service.url, size, scheme)
    page, data = seen.page, picture(5, width=48, height=32)
    seen.upload(data)
    seen.answer("base").first.wait_for()
    tasks = page.locator(".card").evaluate_all("all => all.map(one => one.dataset.task)")
    assert tasks == ["base", "first", "second"]
    for name, logits in world.logits(data, "first", "second").items():
        best = world.model.task(name).spec.classes[int(logits.argmax())]
        assert seen.answer(name).first.locator("span").inner_text() == best  # <b> and all
    assert not page.locator("#heat").is_visible()

    seen.answer("second").first.click()
    page.wait_for_selector("#heat:not([hidden])")
    stage, heat = page.locator("#image").bounding_box(), page.locator("#heat").bounding_box()
    assert stage is not None
    assert heat is not None
    for side in ("x", "y", "width", "height"):  # this backbone sees the whole picture
        assert abs(stage[side] - heat[side]) < 1.5
    assert "second" in page.locator("#attention-title").inner_text()
    assert page.locator("#shares button").count() == 2  # layers
    assert page.locator("#shares u.p4").first.bounding_box()["width"] > 1  # it extends first
    before = page.evaluate("document.getElementById('heat').toDataURL()")
    page.locator("#layer").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#layer-name").inner_text() == "Layer 1"
    assert page.evaluate("document.getElementById('heat').toDataURL()") != before
    page.keyboard.press("Escape")
    assert not page.locator("#heat").is_visible()

    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    ink, paper = page.evaluate(
        "(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))"
    )
    light = [sum(map(int, colour[4:-1].split(","))) / 3 for colour in (ink, paper)]
    assert light[0] - light[1] > 150 if scheme == "dark" else light[1] - light[0] > 150
    assert seen.console == []
    assert seen.elsewhere == []
    seen.close()


@pytest.mark.parametrize("size", SIZES)
def test_answers_say_that_they_can_be_selected(browser: Any, service: Server, size: str) -> None:
    """In words and by an icon, for fingers, keys and screen readers."""
    seen = Seen(browser, service.url, size)
    page = seen.page
    assert not page.locator("#hint").is_visible()
    seen.upload(picture())
    answer = seen.answer("second").first
    answer.wait_for()
    assert "Select an answer to see where" in page.locator("#hint").inner_text()
    assert answer.locator("svg").is_visible()
    assert answer.get_attribute("aria-describedby") == "hint"
    assert answer.get_attribute("title") == "show the attention of second"
    assert answer.bounding_box()["height"] >= 36
    answer.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#heat:not([hidden])")
    assert seen.answer("second").first.get_attribute("aria-pressed") == "true"
    assert seen.answer("second").first.get_attribute("title") == "hide the attention of second"
    assert page.locator("#layer-name").inner_text() == "Layer 2"  # the last third of two layers
    page.keyboard.press("Enter")  # the focus is still there
    assert not page.locator("#heat").is_visible()
    seen.close()


def test_a_bad_file_is_a_sentence_and_the_next_picture_works(seen: Seen) -> None:
    seen.upload(b"these are notes", "notes.txt", "text/plain")
    problem = seen.page.locator("#problem")
    problem.wait_for()
    assert "notes.txt: not an image" in problem.inner_text()
    seen.upload(picture())
    seen.answer("first").first.wait_for()
    assert not problem.is_visible()


def test_a_task_that_is_attached_appears_and_answers(
    seen: Seen, service: Server, world: World
) -> None:
    seen.upload(picture())
    seen.answer("first").first.wait_for()
    url = f"{service.url}/v1/tasks/third"
    data = world.engrams["third"].read_bytes()
    assert httpx.put(url, content=data, headers=AUTH, timeout=60).status_code == 201
    seen.answer("third").first.wait_for()
    assert "third" in seen.page.locator("#news").inner_text()
    assert httpx.delete(url, headers=AUTH, timeout=60).status_code == 204
    seen.refresh()
    seen.page.wait_for_selector("[data-task='third']", state="detached")
    assert seen.console == []


def test_masks_and_heat_maps_lie_over_the_picture_and_numbers_are_told(
    seen: Seen, service: Server, world: World
) -> None:
    kinds = ("segmentation", "regression", "multilabel", "anomaly")
    for kind in kinds:
        url, engram = f"{service.url}/v1/tasks/{kind}", world.engrams[kind].read_bytes()
        assert httpx.put(url, content=engram, headers=AUTH, timeout=60).status_code == 201
    seen.refresh()
    data = picture(2, width=48, height=32)
    seen.upload(data)
    seen.answer("segmentation").first.wait_for()
    assert seen.answer("regression").locator("span").all_inner_texts() == ["one", "two", "three"]
    assert seen.answer("multilabel").locator(".mark").count() == 3
    seen.answer("segmentation").first.click()
    seen.page.wait_for_selector("#mask:not([hidden])")
    decoded = "async mask => { await mask.decode(); return mask.naturalWidth; }"
    assert seen.page.locator("#mask").evaluate(decoded) == 16
    boxes = [seen.page.locator(part).bounding_box() for part in ("#image", "#mask")]
    for side in ("x", "y", "width", "height"):
        assert abs(boxes[0][side] - boxes[1][side]) < 1.5
    seen.page.locator("#layer").focus()
    seen.page.keyboard.press("ArrowRight")
    assert seen.page.locator("#heat").is_visible()
    assert not seen.page.locator("#mask").is_visible()
    seen.answer("anomaly").first.click()
    seen.page.locator("#attention-title", has_text="Heat map").wait_for()
    assert seen.page.locator("#mask").is_visible()
    found = np.array(seen.page.evaluate(BRIGHTNESS, "#mask"))
    row, column = divmod(int(world.logits(data, "anomaly")["anomaly"].argmax()), 4)
    assert found.shape == (32, 32)  # of 4 x 4 patches
    assert found[8 * row + 4, 8 * column + 4] > 0.95 * found.max()
    assert seen.console == []
    for kind in kinds:
        httpx.delete(f"{service.url}/v1/tasks/{kind}", headers=AUTH, timeout=60)


def test_a_card_of_side_patches_says_what_they_are_and_shows_what_they_pool(
    seen: Seen, service: Server, world: World
) -> None:
    for name in ("thin", "layers"):
        url, data = f"{service.url}/v1/tasks/{name}", world.engrams[name].read_bytes()
        assert httpx.put(url, content=data, headers=AUTH, timeout=60).status_code == 201
    seen.refresh()
    seen.upload(picture(2, width=48, height=32))
    seen.answer("thin").first.wait_for()
    assert "side network of rank 4" in seen.page.locator("[data-task='thin']").inner_text()
    assert "reads 3 layers" in seen.page.locator("[data-task='layers']").inner_text()
    seen.answer("thin").first.click()
    seen.page.wait_for_selector("#heat:not([hidden])")
    assert seen.page.locator("#shares button").count() == 1
    assert seen.page.locator("#layer-name").inner_text() == "Pooled"
    assert "what it pools of its side network" in seen.page.locator("#attention-words").inner_text()
    assert seen.console == []
    for name in ("thin", "layers"):
        httpx.delete(f"{service.url}/v1/tasks/{name}", headers=AUTH, timeout=60)


def test_a_task_that_is_not_finite_says_so_on_its_card(
    seen: Seen, service: Server, world: World
) -> None:
    url, data = f"{service.url}/v1/tasks/wild", world.engrams["wild"].read_bytes()
    assert httpx.put(url, content=data, headers=AUTH, timeout=60).status_code == 201
    seen.refresh()
    seen.upload(picture())
    seen.page.locator("[data-task='wild']", has_text="not finite for this image").wait_for()
    seen.answer("first").first.wait_for()
    assert not seen.page.locator("#problem").is_visible()
    assert seen.console == []
    httpx.delete(url, headers=AUTH, timeout=60)


def test_a_picture_that_looks_unfamiliar_is_said_on_the_card(
    seen: Seen, service: Server, world: World, tmp_path: Path
) -> None:
    model = MemoryViT(load_backbone(world.backbone))
    task, url = familiar(model.add_task("known", 3)), f"{service.url}/v1/tasks/known"
    note = seen.page.locator("[data-task='known']")
    for least, words in ((1e3, "unlike what known learned from"), (-1e3, "where 1 is usual")):
        assert task.statistics is not None
        task.statistics.quantiles.copy_(torch.tensor([least, least + 1]))
        data = model.save("known", tmp_path / "known.safetensors").read_bytes()
        assert httpx.put(url, content=data, headers=AUTH, timeout=60).status_code == 201
        seen.refresh()
        seen.upload(picture())
        note.filter(has_text=words).wait_for()
        assert note.locator(".unfamiliar").count() == (least > 0)
        httpx.delete(url, headers=AUTH, timeout=60)
    assert seen.console == []


def test_a_task_that_is_replaced_answers_anew(seen: Seen, service: Server, world: World) -> None:
    url, old = f"{service.url}/v1/tasks/third", world.engrams["third"].read_bytes()
    assert httpx.put(url, content=old, headers=AUTH, timeout=60).status_code == 201
    seen.refresh()
    seen.upload(picture())
    seen.answer("third").first.wait_for()
    new = serialise_engram(read_engram(world.engrams["regression"]).renamed("third"))
    seen.page.route("**/v1/tasks", lambda route: route.abort())  # both happen between two polls
    assert httpx.delete(url, headers=AUTH, timeout=60).status_code == 204
    assert httpx.put(url, content=new, headers=AUTH, timeout=60).status_code == 201
    seen.page.unroute("**/v1/tasks")
    seen.refresh()
    seen.answer("third").filter(has_text="two").wait_for()
    assert seen.answer("third").locator("span").all_inner_texts() == ["one", "two", "three"]
    httpx.delete(url, headers=AUTH, timeout=60)


def test_a_task_that_looks_nowhere_leaves_the_answers_alone(
    browser: Any, launch: Launch, tmp_path: Path
) -> None:
    backbone = random_backbone(
        image_size=16, patch=4, width=32, depth=2, heads=2, class_token=False
    )
    backbone.preprocessing = Preprocessing((16, 16), None)
    save_backbone(backbone, tmp_path / "vit")
    model = MemoryViT(load_backbone(tmp_path / "vit"))
    model.add_task("plain", ["a", "b"], regime="head")
    model.save("plain", tmp_path / "plain.safetensors")
    compose([tmp_path / "plain.safetensors"], tmp_path / "bundle")
    server = launch(tmp_path / "bundle")
    seen = Seen(browser, server.url)
    seen.upload(picture())
    seen.answer("plain").first.click()
    seen.page.locator("#problem", has_text="no attention to show").wait_for()
    seen.upload(picture(2), "b.png")
    seen.page.locator("#caption", has_text="b.png, ").wait_for()
    seen.answer("plain").first.wait_for()
    assert not seen.page.locator("#problem").is_visible()
    seen.close()
    server.stop(signal.SIGKILL)


def test_a_task_is_switched_off_and_on(seen: Seen) -> None:
    seen.upload(picture())
    seen.answer("first").first.wait_for()
    switch = seen.page.get_by_role("switch", name="Run first")
    switch.uncheck()
    assert seen.answer("first").count() == 0
    seen.upload(picture(1))
    seen.answer("second").first.wait_for()
    assert seen.answer("first").count() == 0
    switch.check()
    seen.answer("first").first.wait_for()


def test_the_keyboard_is_enough(seen: Seen) -> None:
    page = seen.page
    page.on("filechooser", lambda chooser: None)  # asked for early: it takes the browser a moment
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "choose":
            break
    assert page.evaluate("document.activeElement.id") == "choose"
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files([{"name": "a.png", "mimeType": "image/png", "buffer": picture()}])
    seen.answer("first").first.wait_for()
    seen.answer("first").first.focus()
    page.keyboard.press("ArrowDown")
    focused = "document.activeElement.dataset.key"
    assert page.evaluate(focused) == "answer first 1"
    page.keyboard.press("Enter")
    page.wait_for_selector("#heat:not([hidden])")
    assert page.evaluate(focused) == "answer first 1"  # cards are drawn again, the focus stays


def test_a_picture_can_be_pasted_and_dropped(seen: Seen) -> None:
    give = """([kind, bytes]) => {
      const transfer = new DataTransfer();
      transfer.items.add(new File([new Uint8Array(bytes)], kind + '.png', {type: 'image/png'}));
      const event = kind === 'paste'
        ? new ClipboardEvent('paste', {clipboardData: transfer, bubbles: true})
        : new DragEvent('drop', {dataTransfer: transfer, bubbles: true});
      document.body.dispatchEvent(event);
    }"""
    for kind in ("paste", "drop"):
        seen.page.evaluate(give, [kind, list(picture())])
        seen.page.locator("#caption", has_text=f"{kind}.png, 24").wait_for()


def test_the_service_goes_and_comes_back(browser: Any, launch: Launch, bundle: Path) -> None:
    server = launch(bundle)
    seen = Seen(browser, server.url)
    server.stop()
    seen.refresh()
    seen.page.wait_for_selector("#problem:not([hidden])")
    assert "does not answer" in seen.page.locator("#problem").inner_text()
    port = server.url.rsplit(":", 1)[1]
    again = launch(bundle, "--port", port)
    seen.refresh()
    seen.page.wait_for_selector("#problem", state="hidden")
    seen.close()
    again.stop()


def test_a_service_that_wants_a_token_is_asked_with_it(
    browser: Any, launch: Launch, bundle: Path
) -> None:
    server = launch(bundle, "--ask-token", "may-ask")
    seen = Seen(browser, server.url, ready="#unlock:not([hidden])")
    page = seen.page
    assert "Enter the token" in page.locator("#problem").inner_text()
    assert page.locator(".card").count() == 0
    for token, ready in (("wrong", "#problem:not([hidden])"), ("may-ask", ".card")):
        page.locator("#token").fill(token)
        page.keyboard.press("Enter")
        page.wait_for_selector(ready)
    assert not page.locator("#problem").is_visible()
    seen.upload(picture())
    seen.answer("first").first.wait_for()
    stored = "[localStorage.length, sessionStorage.length, document.cookie, location.href]"
    assert page.evaluate(stored) == [0, 0, "", f"{server.url}/"]
    assert seen.elsewhere == []
    seen.close()
    server.stop(signal.SIGKILL)


def coloured(name: str, seed: int, tint: tuple[int, int, int]) -> dict[str, Any]:
    """A noisy picture of one colour, as a file to upload."""
    noise = np.random.default_rng(seed).integers(-25, 25, (20, 24, 3))
    file = io.BytesIO()
    Image.fromarray((noise + tint).clip(0, 255).astype(np.uint8)).save(file, "PNG")
    return {"name": f"{name}{seed}.png", "mimeType": "image/png", "buffer": file.getvalue()}


def reds(*seeds: int) -> list[dict[str, Any]]:
    return [coloured("red", seed, (210, 40, 40)) for seed in seeds]


def blues(*seeds: int) -> list[dict[str, Any]]:
    return [coloured("blue", seed, (40, 40, 210)) for seed in seeds]


@pytest.mark.parametrize("size", SIZES)
def test_a_task_is_taught_corrected_and_saved(
    browser: Any, service: Server, world: World, size: str, tmp_path: Path
) -> None:
    seen = Seen(browser, service.url, size)
    page = seen.page
    page.get_by_text("Teach a new task").click()
    page.locator("#teach-name").fill("colours")
    names = page.locator(".lesson > input")
    names.nth(0).fill("<img src=x onerror=alert(1)>")  # a name is text, whatever it says
    names.nth(1).fill("blue")
    files, thumbs = page.locator(".lesson input[multiple]"), page.locator(".thumbs")
    files.nth(0).set_input_files(reds(1))
    page.locator("#lesson-status", has_text="two classes").wait_for()
    files.nth(1).set_input_files([*blues(1), *reds(2)])  # one of them is wrong
    page.locator("#lesson-status", has_text="It learned 3 images of 2 classes").wait_for()

    seen.upload(reds(3)[0]["buffer"], "next.png")
    rows = page.locator("#lesson-rows .answer")
    rows.first.wait_for()
    assert rows.count() == 2
    thumbs.nth(1).get_by_role("button", name="red2.png").first.click()  # show the wrong one
    page.locator("#caption", has_text="red2.png, 24").wait_for()
    rows.filter(has_text="onerror").click()  # and say what it is
    page.locator("#lesson-status", has_text="2 of 2 were right").wait_for()
    assert [thumbs.nth(i).locator("li").count() for i in (0, 1)] == [2, 1]
    seen.upload(blues(3)[0]["buffer"], "blue.png")
    page.locator("#lesson-rows .answer.first", has_text="blue").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]

    with page.expect_download() as download:
        page.locator("#download").click()
    assert download.value.suggested_filename == "colours.safetensors"
    download.value.save_as(tmp_path / "colours.safetensors")
    model = MemoryViT(load_backbone(world.backbone))
    task = model.attach(tmp_path / "colours.safetensors")
    assert task.spec.classes == ("<img src=x onerror=alert(1)>", "blue")
    assert task.sums is not None

    page.locator("#attach").click()
    page.locator("#unlock:not([hidden])").wait_for()  # it needs the token
    page.locator("#token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.locator("#unlock").wait_for(state="hidden")
    for _ in range(2):  # the second takes the place of the first
        page.locator("#attach").click()
        page.locator("#lesson-status", has_text="colours is attached").wait_for()
        files.nth(1).set_input_files(blues(7))
        page.locator("#lesson-status", has_text="It learned").wait_for()
    seen.answer("colours").first.wait_for()
    assert httpx.delete(f"{service.url}/v1/tasks/colours", headers=AUTH).status_code == 204
    assert [line for line in seen.console if "401" not in line] == []
    assert seen.elsewhere == []
    seen.close()


def test_pictures_are_dropped_on_classes(seen: Seen) -> None:
    page = seen.page
    page.get_by_text("Teach a new task").click()
    drop = """(box, [bytes, name]) => {
      const transfer = new DataTransfer();
      transfer.items.add(new File([new Uint8Array(bytes)], name, {type: 'image/png'}));
      box.dispatchEvent(new DragEvent('drop', {dataTransfer: transfer, bubbles: true}));
    }"""
    for i, files in enumerate((reds(1, 2), [*blues(1), *reds(3)])):
        for file in files:
            page.locator(".lesson").nth(i).evaluate(drop, [list(file["buffer"]), file["name"]])
    page.locator("#lesson-status", has_text="It learned 4 images").wait_for()
    assert not page.locator("#figure").is_visible()  # it is no image to ask about
    thumbs = page.locator(".thumbs")
    thumbs.nth(1).locator("li", has=page.get_by_alt_text("red3.png")).drag_to(
        page.locator(".lesson").nth(0)
    )
    page.wait_for_function("document.querySelector('.thumbs').children.length === 3")
    page.locator("#lesson-status", has_text="It learned 4 images").wait_for()
    thumbs.nth(0).get_by_role("button", name="Remove red1.png").click()
    page.locator("#lesson-status", has_text="It learned 3 images").wait_for()
    page.locator(".lesson input[multiple]").nth(0).set_input_files(
        [{"name": "notes.png", "mimeType": "image/png", "buffer": b"these are notes"}]
    )
    page.locator("#teach-problem", has_text="notes.png").wait_for()
    assert thumbs.nth(0).locator("li").count() == 2
    page.locator("#teach-name").fill("No Name!")
    page.locator("#download").click()
    page.locator("#teach-problem", has_text="cannot name a task").wait_for()


@pytest.mark.parametrize(("status", "words"), [(421, "another name"), (429, "try again")])
def test_a_refusal_is_a_sentence(seen: Seen, status: int, words: str) -> None:
    error = {"error": "It is refused; try again in a second."}
    seen.page.route("**/v1/predict", lambda route: route.fulfill(status=status, json=error))
    seen.upload(picture())
    seen.page.locator("#problem", has_text=words).wait_for()
    seen.page.unroute("**/v1/predict")
    seen.upload(picture(1))
    seen.answer("first").first.wait_for()


def test_the_reference_is_quiet(seen: Seen) -> None:
    seen.page.get_by_role("link", name="Reference").click()
    seen.page.get_by_text("Attach an engram").wait_for()
    assert seen.console == []
    assert seen.elsewhere == []


def test_the_reference_needs_no_network(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/predict" in page.text
    assert "http" not in page.text.replace("HTTP", "")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/openapi.json").json()["paths"].keys() >= {"/v1/predict", "/v1/tasks"}
