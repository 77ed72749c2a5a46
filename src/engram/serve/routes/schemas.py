"""Requests and responses, as the OpenAPI document describes them."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, create_model

MAX_TASKS = 1000  # that a request may name

TaskName = Annotated[str, Field(max_length=64)]


def _as_int(value: Any) -> Any:
    """JSON has one type of number, so 5.0 counts as 5."""
    return int(value) if type(value) is float and value.is_integer() else value


class Options(BaseModel):
    """Which tasks to run."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tasks: Annotated[
        list[TaskName] | None,
        Field(
            min_length=1,
            max_length=MAX_TASKS,
            description="Tasks to run; default: all of them, and base",
        ),
        FailFast(),
    ] = None


class PredictOptions(Options):
    """Which tasks to run and what to return."""

    top_k: Annotated[
        int,
        Field(ge=1, le=1000, description="Number of classes to return per task"),
        BeforeValidator(_as_int),
    ] = 5
    looks: Annotated[
        TaskName | None, Field(description="A task whose attention maps to return")
    ] = None


class EmbedOptions(Options):
    """Which vectors to return."""


#: What requests may say, by the name under which the service and its decoders know it.
OPTIONS: dict[str, type[Options]] = {
    options.__name__: options for options in (PredictOptions, EmbedOptions)
}


class WithImages(Options):
    """A request as JSON: options, and images in base64."""

    images: list[str]


@cache
def json_body(options: type[Options], max_images: int, max_body: int) -> type[WithImages]:
    """The body of a request as JSON, with the limits of a service; its first error ends it."""
    image = Annotated[str, Field(max_length=max_body, json_schema_extra={"format": "byte"})]
    about = Field(min_length=1, max_length=max_images, description="Images in base64")
    images = Annotated[list[image], about, FailFast()]
    bases: Any = (options, WithImages)
    body: type[WithImages] = create_model(
        _titled(options, "Json"), __base__=bases, images=(images, ...)
    )
    return body


@cache
def form_body(options: type[Options], max_images: int) -> type[Options]:
    """The body of a request as a form, for the OpenAPI document."""
    image = Annotated[str, Field(json_schema_extra={"format": "binary"})]
    about = Field(min_length=1, max_length=max_images, description="Images, one file each")
    images = Annotated[list[image], about]
    return create_model(_titled(options, "Form"), __base__=options, image=(images, ...))


def _titled(options: type[Options], form: str) -> str:
    return options.__name__.replace("Options", form)


class Named(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True, extra="forbid")

    name: Annotated[str, Field(alias="class")]


class LikelyClass(Named):
    """An answer of classification: the most likely class first."""

    probability: float


class Label(Named):
    """An answer of multilabel: the most likely class first, and all classes that are present."""

    probability: float
    threshold: float
    present: Annotated[bool, Field(description="Whether it reaches its threshold")]


class Number(BaseModel):
    """An answer of regression, in the units of the labels."""

    model_config = ConfigDict(extra="forbid")

    name: str
    value: float


class Area(Named):
    """A class in a mask; the largest area comes first."""

    share: Annotated[float, Field(description="Share of the view")]
    colour: Annotated[str, Field(description="Its colour in the mask")]


class Mask(BaseModel):
    """An answer of segmentation: one class for every pixel of the view."""

    classes: list[Area]
    size: Annotated[list[int], Field(description="Height and width")]
    mask: Annotated[str, Field(description="A PNG as a data: URL; a pixel's value is its class")]


class TaskAnswer(BaseModel):
    kind: Literal["classification", "multilabel", "regression", "segmentation"]
    answer: list[LikelyClass] | list[Label] | list[Number] | Mask
    score: Annotated[
        float | None,
        Field(
            description="How much the image is like those that the task learned from: 1 is usual, "
            "and below 0 it is less like them than 95 % of validation images. Only of tasks that "
            "keep statistics of their training images, and not of the ONNX engines"
        ),
    ] = None


class NoAnswer(BaseModel):
    """For a task whose output is not finite; the other tasks still answer."""

    kind: str
    error: Annotated[str, Field(description="A sentence: what is wrong and what to do")]


class LayerLook(BaseModel):
    shares: Annotated[list[float], Field(description="Attention weight of each part; the sum is 1")]
    patches: Annotated[
        list[list[float]],
        Field(
            description="How much each patch contributes to what the class token reads, row by "
            "row; 0 for a patch that works against the rest"
        ),
    ]


class Look(BaseModel):
    task: str
    parts: Annotated[list[str], Field(description="What the class token can attend to")]
    pooled: Annotated[
        bool,
        Field(
            description="Whether there is one entry instead of one per layer: how the task pools "
            "its side network after the last layer"
        ),
    ]
    layers: list[LayerLook]


class SentImage(BaseModel):
    name: str
    width: int
    height: int
    view: Annotated[
        list[float],
        Field(description="The part that the ViT saw: left, top, right, bottom in pixels"),
    ]


class ImageAnswer(SentImage):
    tasks: dict[str, TaskAnswer | NoAnswer]
    looks: Look | None = None


class Prediction(BaseModel):
    images: list[ImageAnswer]


class ImageVectors(SentImage):
    vectors: Annotated[
        dict[str, list[float]],
        Field(description="By task, base for the ViT itself: what its head is given of the image"),
    ]
    errors: Annotated[
        dict[str, str] | None,
        Field(description="Tasks whose vector is not finite: what is wrong and what to do"),
    ] = None


class Embedding(BaseModel):
    images: list[ImageVectors]


class TaskInfo(BaseModel):
    name: str
    kind: str
    classes: Annotated[int, Field(description="Number of classes")]
    regime: str
    settings: Annotated[
        dict[str, Any], Field(description="Settings of the method, such as the cells per layer")
    ]
    extends: list[str]
    parameters: int
    content: Annotated[str, Field(description="Hash of everything that affects its answers")]
    metrics: dict[str, Any]


class TaskDetail(TaskInfo):
    class_names: list[str]
    created: str
    library: str
    recipe: dict[str, Any]


class BackboneFacts(BaseModel):
    source: str
    fingerprint: str
    classes: Annotated[
        int | None, Field(description="Number of classes of its own head, called base")
    ]
    image_size: list[int]
    layers: int


class TaskList(BaseModel):
    tag: Annotated[str, Field(description="Changes when a task is attached or removed")]
    backbone: BackboneFacts
    tasks: list[TaskInfo]
    engine: Annotated[str, Field(description="What runs the model")]
    attaching: Annotated[bool, Field(description="Whether tasks can be attached and removed")]


class Status(BaseModel):
    status: str


class Error(BaseModel):
    error: Annotated[str, Field(description="A sentence: what is wrong and what to do")]
