"""A machine-learning backend for Label Studio: answers of a service as predictions, and annotations
as a folder of labelled images.

It is a client of the service and of Label Studio, in a process of its own, so that neither knows
the other. Label Studio asks `/predict` for images that are to be labelled, and tells `/webhook`
what people chose; each image then lies in the folder of its class, which `engram fit` reads.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import xml.etree.ElementTree as ElementTree
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

from engram.errors import EngramError, flag
from engram.serve.hosts import is_loopback, is_own_name
from engram.serve.launch import listen
from engram.serve.middleware import add_handlers, error_response
from engram.serve.problems import Problem
from engram.serve.service_settings import LabelSettings
from engram.util.files import make_folder, write_atomically
from engram.util.text import printable

Kind = TypeVar("Kind")

_MAX_IMAGE = 64_000_000  # bytes
_MAX_CONFIG = 1_000_000  # characters of a labelling configuration
_SECONDS = 60.0
_KINDS: dict[type, str] = {dict: "object", list: "list", int: "number"}
_SUFFIXES = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG": ".png",
    b"GIF8": ".gif",
    b"RIFF": ".webp",
    b"BM": ".bmp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
}


@dataclass(frozen=True)
class LabelSecrets:
    """Tokens and passwords, from the environment."""

    ask_token: str = ""  # of the service
    api_key: str = ""  # of Label Studio, which its images need
    password: str = ""  # that Label Studio sends here


@dataclass(frozen=True)
class Choices:
    """The part of a labelling configuration that a classification fills in."""

    name: str  # of the choices, and of the image that they are about
    image: str
    field: str  # of a task's data that has the address of the image
    values: tuple[str, ...]

    @classmethod
    def parse(cls, config: object) -> Choices:
        """Read `<Image name= value="$field"/>` and `<Choices toName=>` of a configuration."""
        if not isinstance(config, str) or len(config) > _MAX_CONFIG:
            raise Problem(422, "There is no labelling configuration in the request.")
        try:
            root = ElementTree.fromstring(config)
        except ElementTree.ParseError as error:
            raise Problem(422, f"The labelling configuration is no XML: {error}.") from None
        images = {one.get("name"): one.get("value") or "" for one in root.iter("Image")}
        for found in root.iter("Choices"):
            image, name = found.get("toName", ""), found.get("name", "")
            if name and image in images:
                values = [
                    one.get("alias") or one.get("value") or "" for one in found.iter("Choice")
                ]
                return cls(name, image, images[image].lstrip("$"), tuple(values))
        raise Problem(
            422, "The labelling configuration has no <Choices> about an <Image>, and only those "
            "can be predicted."
        )  # fmt: skip


class LabelBackend:
    """Predicts with one task of a service, and keeps what people chose in a folder."""

    def __init__(
        self, settings: LabelSettings, task: str, out: Path, own: LabelSecrets, client: httpx.Client
    ) -> None:
        self.settings, self.task, self.out, self.secrets = settings, task, out, own
        self._client = client

    @property
    def version(self) -> str:
        """The version of the task that answers now."""
        return str(self._ask("GET", f"/v1/tasks/{self.task}").json()["content"][:16])

    def prediction(self, task: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
        """The prediction for a task of Label Studio; one without an answer has no result."""
        image, form = self.read_image(task, choices), {"tasks": self.task, "top_k": "1000"}
        response = self._ask("POST", "/v1/predict", files={"image": ("image", image)}, data=form)
        document = response.json()
        answer = document["images"][0]["tasks"][self.task]
        if answer["kind"] not in ("classification", "multilabel"):
            raise Problem(409, f"{self.task!r} is a task of {answer['kind']}, and has no choices.")
        rows = [row for row in answer.get("answer", ()) if row["class"] in choices.values]
        # Of labels all that are present, of classes the likeliest.
        rows = [row for i, row in enumerate(rows) if row.get("present", i == 0)]
        value = {"choices": [row["class"] for row in rows]}
        about = {"from_name": choices.name, "to_name": choices.image, "type": "choices"}
        return {
            "result": [{**about, "value": value}] if rows else [],
            "score": min((row["probability"] for row in rows), default=0.0),
            "model_version": document["contents"][self.task][:16],
        }

    def annotated(self, event: Mapping[str, Any]) -> str:
        """Follow an event of Label Studio; gives what was done."""
        action = event.get("action")
        if action in ("ANNOTATION_CREATED", "ANNOTATION_UPDATED"):
            return self._keep(event)
        if action == "ANNOTATIONS_DELETED":
            for annotation in _field(event, "annotations", list):
                self._forget(_field(annotation, "id", int))
            return "deleted"
        return "ignored"

    def _keep(self, event: Mapping[str, Any]) -> str:
        """Put an annotated image into the folder of its class, and out of any other."""
        annotation, task = _field(event, "annotation", dict), _field(event, "task", dict)
        choices = Choices.parse(_field(event, "project", dict).get("label_config"))
        number = _field(annotation, "id", int)
        chosen = [
            str(choice)
            for result in _field(annotation, "result", list)
            if isinstance(result, dict) and result.get("from_name") == choices.name
            for choice in _field(_field(result, "value", dict), "choices", list)
        ]
        if annotation.get("was_cancelled") or len(chosen) != 1:
            self._forget(number)
            return "skipped" if annotation.get("was_cancelled") else "not one choice"
        label = chosen[0]
        if label not in choices.values or Path(label).name != label or label.startswith("."):
            raise Problem(
                422, f"{printable(label, 80)!r} cannot be the name of a folder of images."
            )
        image = self.read_image(task, choices)
        suffix = next((s for start, s in _SUFFIXES.items() if image.startswith(start)), "")
        if not suffix:
            raise Problem(422, "The image is in no format that can be recognised.")
        path = self.out / label / f"{_field(task, 'id', int)}-{number}{suffix}"
        make_folder(path.parent)
        write_atomically(path, image)
        self._forget(number, but=path)
        return "kept"

    def _forget(self, annotation: int, but: Path | None = None) -> None:
        for path in self.out.glob(f"*/*-{annotation}.*"):
            if path != but:
                path.unlink(missing_ok=True)

    def read_image(self, task: Mapping[str, Any], choices: Choices) -> bytes:
        """The image of a task: inside of it, or from an address that may be read."""
        address = _field(task, "data", dict).get(choices.field)
        if not isinstance(address, str):
            raise Problem(422, f"The task has no text under {printable(choices.field, 80)!r}.")
        if address.startswith("data:"):
            try:
                return base64.b64decode(address.partition(",")[2], validate=True)
            except binascii.Error:
                raise Problem(422, "The image in the task is not in base64.") from None
        own = self.settings.label_studio
        url = urljoin(own.rstrip("/") + "/", address)
        if not any(_below(url, allowed) for allowed in (own, *self.settings.images)):
            raise Problem(
                422,
                f"Images are not read from {printable(urlsplit(url).netloc, 80)}; allow its "
                f"address with {flag('images')}.",
            )
        key = self.secrets.api_key if _below(url, own) else ""
        headers = {"Authorization": f"Token {key}"} if key else {}
        data = bytearray()
        try:
            with self._client.stream("GET", url, headers=headers) as response:
                response.raise_for_status()
                for piece in response.iter_bytes():
                    data += piece
                    if len(data) > _MAX_IMAGE:
                        raise Problem(422, f"The image has more than {_MAX_IMAGE:,} bytes.")
        except httpx.HTTPError as error:
            raise Problem(502, f"The image cannot be read: {error}.") from None
        return bytes(data)

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        token = self.secrets.ask_token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = self.settings.service.rstrip("/") + path
        try:
            response = self._client.request(method, url, headers=headers, **more)
        except httpx.HTTPError as error:
            raise Problem(502, f"The service does not answer: {error}.") from None
        if response.status_code != 200:
            raise Problem(502, f"The service answers with {response.status_code}: {response.text}")
        return response


def _below(url: str, allowed: str) -> bool:
    """Whether an address is at this server, and below this path."""
    one, other = urlsplit(url), urlsplit(allowed)
    same = (one.scheme, one.netloc) == (other.scheme, other.netloc)
    path = other.path.rstrip("/") + "/"
    return same and ".." not in one.path and (one.path or "/").startswith(path)


def _field(parent: object, name: str, kind: type[Kind]) -> Kind:
    """A field of an object in a request, or a Problem; a list may be missing."""
    found: Any = parent.get(name) if isinstance(parent, dict) else None
    if found is None and kind is list:
        found = []
    if not isinstance(found, kind) or (isinstance(found, int) and found < 0):
        raise Problem(422, f"{name!r} in the request is missing, or no {_KINDS[kind]}.")
    return found


def label_app(backend: LabelBackend) -> FastAPI:
    """The endpoints that Label Studio calls; with a password, by HTTP basic authentication."""
    password = backend.secrets.password
    app = FastAPI(title="Engram for Label Studio", docs_url=None, redoc_url=None, openapi_url=None)
    add_handlers(app)

    @app.middleware("http")
    async def guard(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Refuse requests of other sites' pages, and without the password."""
        kind = request.headers.get("content-type", "").partition(";")[0]
        host = request.headers.get("host", "")
        if not password and not is_own_name(host, backend.settings.host):
            sentence = "The Host header names none of the names of this backend."
            return error_response(Problem(421, sentence))
        if request.method == "POST" and kind != "application/json":
            return error_response(Problem(415, "The body must be JSON, with its content type."))
        if password and not _authorised(request.headers.get("authorization", ""), password):
            response = error_response(Problem(401, "The password is missing or wrong."))
            response.headers["WWW-Authenticate"] = "Basic"
            return response
        return await call_next(request)

    @app.get("/health")
    @app.get("/")
    def health() -> dict[str, str]:
        return {"status": "UP", "model_class": "Engram"}

    @app.post("/setup")
    def setup(body: dict[str, Any]) -> dict[str, str]:
        Choices.parse(body.get("schema"))
        return {"model_version": backend.version}

    @app.post("/predict")
    def predict(body: dict[str, Any]) -> dict[str, Any]:
        choices = Choices.parse(body.get("label_config"))
        tasks = [task for task in _field(body, "tasks", list) if isinstance(task, dict)]
        return {"results": [backend.prediction(task, choices) for task in tasks]}

    @app.post("/webhook", status_code=201)
    def webhook(body: dict[str, Any]) -> dict[str, str]:
        return {"result": backend.annotated(body)}

    @app.api_route("/versions", methods=["GET", "POST"])
    def versions() -> dict[str, list[str]]:
        return {"versions": [backend.version]}

    return app


def _authorised(header: str, password: str) -> bool:
    """Whether a header of basic authentication has the password; any name will do."""
    kind, _, value = header.partition(" ")
    try:
        _, _, sent = base64.b64decode(value, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return False
    same = secrets.compare_digest(sent.encode(), password.encode())
    return kind.lower() == "basic" and same


def run_label_backend(
    settings: LabelSettings, task: str, out: Path, own: LabelSecrets, ready: Callable[[str], object]
) -> None:
    """Answer Label Studio until a signal comes; `ready` is called with the address."""
    if not is_loopback(settings.host) and not own.password:
        raise EngramError(
            f"{flag('host')} is {settings.host}, so other machines can write into {out}; set a "
            "password in ENGRAM_LABEL_PASSWORD, and the same in Label Studio (basic "
            "authentication)."
        )
    make_folder(out)
    with listen(settings.host, settings.port) as listener, httpx.Client(timeout=_SECONDS) as client:
        backend = LabelBackend(settings, task, out, own, client)
        ready(f"http://{settings.host}:{listener.getsockname()[1]}")
        uvicorn.Server(uvicorn.Config(label_app(backend), log_level="warning")).run(
            sockets=[listener]
        )
