"""What goes in and what comes out, as the OpenAPI document tells it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Ask(BaseModel):
    """What is wanted, beside the images."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tasks: Annotated[
        list[str] | None, Field(min_length=1, max_length=1000, description="Default: all, and base")
    ] = None
    top_k: Annotated[int, Field(ge=1, le=1000, description="Classes of each answer")] = 5
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


class LikelyClass(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True)

    name: Annotated[str, Field(alias="class")]
    probability: float


class TaskAnswer(BaseModel):
    kind: str
    answer: list[LikelyClass]


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
    tasks: dict[str, TaskAnswer]
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
    attaching: Annotated[bool, Field(description="Whether tasks can be attached and deleted")]


class Status(BaseModel):
    status: str


class Error(BaseModel):
    error: Annotated[str, Field(description="A sentence: what is wrong and what to do")]
