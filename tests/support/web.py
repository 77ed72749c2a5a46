"""A static host, and the exported page in a browser."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

#: A script: how bright the pixels of an image or a canvas are, row by row.
BRIGHTNESS = """async (id) => {
    const from = document.querySelector(id);
    await from.decode?.();
    const [width, height] = [from.naturalWidth ?? from.width, from.naturalHeight ?? from.height];
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    const context = canvas.getContext("2d");
    context.drawImage(from, 0, 0);
    const { data } = context.getImageData(0, 0, width, height);
    const at = (y, x) => 4 * (y * width + x);
    const light = (y, x) => data.slice(at(y, x), at(y, x) + 3).reduce((a, b) => a + b);
    const row = (y) => Array.from({ length: width }, (_, x) => light(y, x));
    return Array.from({ length: height }, (_, y) => row(y));
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


class StaticHost:
    """Serves a folder as it is, at `address`, inside of a `with`."""

    def __init__(self, folder: Path) -> None:
        handler = partial(_Quiet, directory=str(folder))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> StaticHost:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def opened(page: Any, address: str) -> None:
    """Open an exported page, and wait until its model is loaded."""
    page.goto(address)
    page.wait_for_selector("body[data-ready], #problem:not([hidden])", state="attached", timeout=0)
    assert page.locator("#problem").is_hidden(), page.locator("#problem").text_content()


def answered(page: Any, image: Path) -> dict[str, Any]:
    """What the page shows about an image: by task its rows and its text, and the mask's size."""
    before = page.evaluate("Number(document.body.dataset.answered || 0)")
    page.set_input_files("#file", str(image))
    page.wait_for_function(
        "before => Number(document.body.dataset.answered || 0) > before"
        " || !document.querySelector('#problem').hidden",
        arg=before,
        timeout=0,
    )
    assert page.locator("#problem").is_hidden(), page.locator("#problem").text_content()
    found: dict[str, Any] = page.evaluate(
        """() => {
            const rows = (card) => [...card.querySelectorAll(".answer")].map((row) => ({
                label: row.querySelector("span").textContent,
                text: row.querySelector("b").textContent,
                share: Number(row.style.getPropertyValue("--share")),
            }));
            const cards = [...document.querySelectorAll("article")];
            const said = (card) => ({ rows: rows(card), text: card.textContent });
            const found = Object.fromEntries(cards.map((card) => [card.dataset.task, said(card)]));
            const mask = document.getElementById("mask");
            return { ...found, mask: mask.hidden ? null : [mask.height, mask.width] };
        }"""
    )
    return found
