"""What goes in and what comes out, as the OpenAPI document tells it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    """JSON knows one type of number, so that 5.0 is 5."""
    return int(value) if type(value) is float and value.is_integer() else value


class Ask(BaseModel):
    """What is wanted, beside the images."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tasks: Annotated[
        list[str] | None, Field(min_length=1, max_length=1000, description="Default: all, and base")
    ] = None
    top_k: Annotated[
        int, Field(ge=1, le=1000, description="Classes of each answer"), BeforeValidator(_whole)
    ] = 5
    looks: Annotated[
        str | None, Field(description="A task, to see where its class token looked")
    ] = None


class AskJson(Ask):
    images: Annotated[
        list[Annotated[str, Field(json_schema_extra={"format": "byte"})]],
        Field(min_length=1, description="Images in base64"),
    ]


class AskForm(Ask):
    image: Annotated[
        list[Annotated[str, Field(json_schema_extra={"format": "binary"})]],
        Field(min_length=1, description="Images, one file each"),
    ]


class Named(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True, extra="forbid")

    name: Annotated[str, Field(alias="class")]


class LikelyClass(Named):
    """Of classification: the likeliest first."""

    probability: float


class Label(Named):
    """Of multilabel: the likeliest first, and all that are present."""

    probability: float
    threshold: float
    present: Annotated[bool, Field(description="Whether it reaches its threshold")]


class Number(BaseModel):
    """Of regression, in the units of the labels."""

    model_config = ConfigDict(extra="forbid")

    name: str
    value: float


class Area(Named):
    """Of segmentation: the largest first."""

    share: Annotated[float, Field(description="Of what the ViT saw")]
    colour: Annotated[str, Field(description="In the mask")]


class Mask(BaseModel):
    """Of segmentation: one class for every pixel of the view."""

    classes: list[Area]
    size: Annotated[list[int], Field(description="Height and width")]
    mask: Annotated[str, Field(description="A PNG as a data: URL; a pixel's number is its class")]


class TaskAnswer(BaseModel):
    kind: Literal["classification", "multilabel", "regression", "segmentation"]
    answer: list[LikelyClass] | list[Label] | list[Number] | Mask


class NoAnswer(BaseModel):
    """Of a task whose numbers are not finite; the others answer."""

    kind: str
    error: Annotated[str, Field(description="A sentence: what is wrong and what to do")]


class LayerLook(BaseModel):
    shares: Annotated[list[float], Field(description="Of each part; they add up to 1")]
    patches: Annotated[list[list[float]], Field(description="Of each patch, row by row")]


class Look(BaseModel):
    task: str
    parts: Annotated[list[str], Field(description="What the class token reads")]
    layers: list[LayerLook]


class ImageAnswer(BaseModel):
    name: str
    width: int
    height: int
    view: Annotated[
        list[float], Field(description="Left, top, right, bottom of what was seen, in pixels")
    ]
    tasks: dict[str, TaskAnswer | NoAnswer]
    looks: Look | None = None


class Prediction(BaseModel):
    images: list[ImageAnswer]


class TaskInfo(BaseModel):
    name: str
    kind: str
    classes: Annotated[int, Field(description="How many")]
    regime: str
    cells: Annotated[int, Field(description="At every layer")]
    extends: list[str]
    parameters: int
    content: Annotated[str, Field(description="A hash of all that decides its answers")]
    metrics: dict[str, Any]


class TaskDetail(TaskInfo):
    class_names: list[str]
    created: str
    library: str
    recipe: dict[str, Any]


class TrunkFacts(BaseModel):
    source: str
    fingerprint: str
    classes: Annotated[int | None, Field(description="Of its own head, called base")]
    image_size: list[int]
    layers: int


class TaskList(BaseModel):
    tag: Annotated[str, Field(description="Changes when a task comes or goes")]
    trunk: TrunkFacts
    tasks: list[TaskInfo]
    engine: Annotated[str, Field(description="What computes the answers")]
    attaching: Annotated[bool, Field(description="Whether tasks can be attached and deleted")]


class Status(BaseModel):
    status: str


class Error(BaseModel):
    error: Annotated[str, Field(description="A sentence: what is wrong and what to do")]
