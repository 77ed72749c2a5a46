"""Requests and responses, as pydantic checks them and the OpenAPI document describes them."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    create_model,
    model_validator,
)

MAX_TASKS = 1000  # that a request may name

TaskName = Annotated[str, Field(max_length=64)]
WholeNumber = Annotated[  # JSON has one type of number, so 5.0 counts as 5
    int, BeforeValidator(lambda x: int(x) if type(x) is float and x.is_integer() else x)
]

# Requests


class Options(BaseModel):
    """Options of every request: the tasks to run."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tasks: Annotated[list[TaskName] | None, FailFast()] = Field(
        None, min_length=1, max_length=MAX_TASKS, description="Tasks to run; default: all, and base"
    )


class PredictOptions(Options):
    """Options of /v1/predict."""

    top_k: WholeNumber = Field(5, ge=1, le=1000, description="Number of classes to return per task")
    attention: TaskName | None = Field(None, description="A task whose attention maps to return")


class EmbedOptions(Options):
    """Options of /v1/embed."""


@cache
def body_with_images(options: type[Options], most: int, *, form: bool = False) -> type[Any]:
    """The body of a request, as JSON or a form, with the limit of a service on images."""
    name, kind, how = (
        ("image", "binary", "one file each") if form else ("images", "byte", "in base64")
    )
    image = Annotated[str, Field(json_schema_extra={"format": kind})]
    about = Field(min_length=1, max_length=most, description=f"Images, {how}")
    fields: Any = {name: (Annotated[list[image], about, FailFast()], ...)}
    model = options.__name__.replace("Options", "Form" if form else "Json")
    return create_model(model, __base__=options, **fields)


# Requests that teach

MAX_VECTORS = 500  # of a request

ClassName = Annotated[str, Field(min_length=1, max_length=200)]


class TeachOptions(BaseModel):
    """A task to teach, and the class of each vector."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task: TaskName = Field(description="Name of the task")
    labels: Annotated[list[ClassName], FailFast()] = Field(
        min_length=2, max_length=MAX_VECTORS, description="The class of each image"
    )
    statistics: Literal["on", "off"] = Field(
        "on",
        description="Keep statistics of the images, for familiarity, and to learn more, forget "
        "and merge later",
    )


class TeachRequest(TeachOptions):
    """The body of /v1/teach."""

    vectors: list[Any] = Field(
        min_length=1, description="For each label the vector of an image: base of /v1/embed"
    )


# Requests of the Open Inference Protocol (KServe v2, Triton)

IMAGE, PIXELS = "image", "pixel_values"
LOGITS = ":logits"  # after the name of a task: the output it makes a mask of

Count = Annotated[int, Field(ge=0, le=10**12)]  # with more digits, a number is an attack


class _RequestPart(BaseModel):
    """A part of a request; what it has beyond these fields is for other servers."""

    model_config = ConfigDict(extra="ignore", strict=True)


class InputParameters(_RequestPart):
    binary_data_size: Count | None = Field(
        default=None, description="Bytes of this tensor after the JSON"
    )


class InferInput(_RequestPart):
    name: Literal["image", "pixel_values"] = Field(
        description="Encoded images as BYTES, or normalised pixels as FP32"
    )
    shape: list[Count] = Field(min_length=1, max_length=4)
    datatype: str = Field(max_length=20)
    parameters: InputParameters = InputParameters()
    data: list[Any] | None = Field(None, description="Flat or nested; images are in base64")


class OutputParameters(_RequestPart):
    binary_data: bool | None = Field(
        default=None, description="Whether the tensor follows the JSON as bytes"
    )
    classification: int | None = Field(
        default=None, ge=1, le=1000, description="Most likely classes, as probability:index:class"
    )


class InferOutput(_RequestPart):
    name: str = Field(
        max_length=64 + len(LOGITS),
        description=f"A task, or a segmentation with {LOGITS} for its logits",
    )
    parameters: OutputParameters = OutputParameters()


class RequestParameters(_RequestPart):
    binary_data_output: bool = Field(
        default=False, description="Whether tensors follow the JSON as bytes"
    )


class InferOptions(_RequestPart):
    id: str | None = Field(None, max_length=200)
    parameters: RequestParameters = RequestParameters()
    outputs: Annotated[list[InferOutput] | None, FailFast()] = Field(
        None,
        min_length=1,
        max_length=MAX_TASKS,
        description="Each once; default: all tasks, and masks of segmentations",
    )

    def wants_binary(self, output: InferOutput) -> bool:
        own = output.parameters.binary_data
        return self.parameters.binary_data_output if own is None else own


class InferRequest(InferOptions):
    inputs: Annotated[list[InferInput], FailFast()] = Field(min_length=1, max_length=1)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        tensor = self.inputs[0]
        if (tensor.data is None) == (tensor.parameters.binary_data_size is None):
            raise ValueError("an input has either data or binary_data_size")
        return self


# Responses of the Open Inference Protocol


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int]


class OutputTensor(TensorMetadata):
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class InferResponse(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


class ModelMetadata(BaseModel):
    name: str
    versions: list[str] = Field(description="Changes with what the model answers")
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelReady(BaseModel):
    name: str
    ready: bool


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


# Responses about images


class Named(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True, extra="forbid")

    name: str = Field(alias="class")


class LikelyClass(Named):
    """An answer of classification: the most likely class first."""

    probability: float


class Label(Named):
    """An answer of multilabel: the most likely class first, and all classes that are present."""

    probability: float
    threshold: float
    present: bool = Field(description="Whether it reaches its threshold")


class Number(BaseModel):
    """An answer of regression, in the units of the labels."""

    model_config = ConfigDict(extra="forbid")

    name: str
    value: float


class Area(Named):
    """A class in a mask; the largest area comes first."""

    share: float = Field(description="Share of the view")
    colour: str = Field(description="Its colour in the mask")


class Mask(BaseModel):
    """An answer of segmentation: one class for every pixel of the view."""

    classes: list[Area]
    size: list[int] = Field(description="Height and width")
    mask: str = Field(description="A PNG as a data: URL; a pixel's value is its class")


class HeatMap(BaseModel):
    """An answer of anomaly: whether the image is like the good ones, and where it is not."""

    score: float = Field(description="Mean distance of the worst 1 % of its patches to good ones")
    threshold: float
    anomalous: bool = Field(description="Whether the score exceeds the threshold")
    size: list[int] = Field(description="Rows and columns of patches")
    map: str = Field(
        description="A PNG of the view as a data: URL; a pixel's value is its distance, 128 at "
        "the threshold"
    )


class TaskAnswer(BaseModel):
    kind: Literal["classification", "multilabel", "regression", "segmentation", "anomaly"]
    answer: list[LikelyClass] | list[Label] | list[Number] | Mask | HeatMap
    familiarity: float | None = Field(
        None,
        description="How much the image is like those that the task learned from: 1 is usual, "
        "and below 0 it is less like them than 95 % of validation images. Only of tasks that "
        "keep statistics of their training images",
    )


class NoAnswer(BaseModel):
    """The answer of a task whose output is not finite; the other tasks still answer."""

    kind: str
    error: str = Field(description="A sentence: what is wrong and what to do")


class LayerAttention(BaseModel):
    shares: list[float] = Field(description="Attention weight of each part; the sum is 1")
    patches: list[list[float]] = Field(
        description="How much each patch contributes to what the class token reads, row by row; "
        "0 for a patch that works against the rest"
    )


class TaskAttention(BaseModel):
    task: str
    parts: list[str] = Field(description="What the class token can attend to")
    pooled: bool = Field(
        description="Whether there is one entry instead of one per layer: how the task pools its "
        "side network after the last layer"
    )
    layers: list[LayerAttention]


class SentImage(BaseModel):
    name: str
    width: int
    height: int
    view: list[float] = Field(
        description="The part that the ViT saw: left, top, right, bottom in pixels"
    )


class ImageAnswer(SentImage):
    tasks: dict[str, TaskAnswer | NoAnswer]
    attention: TaskAttention | None = None


class Answering(BaseModel):
    contents: dict[str, str] = Field(
        description="By task, the content hash of the version that answered; of base, the "
        "fingerprint of the backbone"
    )


class Prediction(Answering):
    images: list[ImageAnswer]


class ImageVectors(SentImage):
    vectors: dict[str, list[float]] = Field(
        description="By task, base for the ViT itself: the input of its head"
    )
    errors: dict[str, str] | None = Field(
        None, description="Tasks whose vector is not finite: what is wrong and what to do"
    )


class Embedding(Answering):
    images: list[ImageVectors]


# Responses about tasks and the service


class TaskInfo(BaseModel):
    name: str
    kind: str
    classes: int = Field(description="Number of classes")
    regime: str
    settings: dict[str, Any] = Field(
        description="Settings of the method, such as the cells per layer"
    )
    extends: list[str]
    parameters: int
    content: str = Field(description="Hash of everything that affects its answers")
    metrics: dict[str, Any]


class ReplacedVersion(BaseModel):
    content: str
    until: str = Field(description="When another version took its place")


class TaskDetail(TaskInfo):
    class_names: list[str]
    created: str
    library: str
    recipe: dict[str, Any]
    older: list[ReplacedVersion] = Field(
        description="The versions that this one can be rolled back to, the last one first"
    )
    shadow: str | None = Field(
        description="Content of a new version that answers into metrics and the log only"
    )


class BackboneFacts(BaseModel):
    source: str
    fingerprint: str
    classes: int | None = Field(description="Number of classes of its own head, called base")
    image_size: list[int]
    layers: int


class TaskList(BaseModel):
    tag: str = Field(description="Changes when a task is attached, replaced or removed")
    backbone: BackboneFacts
    tasks: list[TaskInfo]
    engine: str = Field(description="What runs the model")
    attaching: bool = Field(description="Whether tasks can be attached and removed")


class Status(BaseModel):
    status: str


class Error(BaseModel):
    error: str = Field(description="A sentence: what is wrong and what to do")


# The OpenAPI document

_REASONS = {
    400: "The request or its body cannot be read",
    401: "The token is missing or wrong",
    403: "Attaching is disabled: the service was started without a token",
    404: "There is no such task",
    408: "The body arrived too slowly",
    409: "The engram does not fit, or the task cannot be changed so",
    412: "The task is not the one that If-Match or If-None-Match says",
    413: "The body is too large",
    415: "The content type is not supported",
    421: "The Host header names none of the names of this service",
    422: "An image, an engram or an option is invalid, or the answer would be too large",
    429: "This client has too many requests in progress; Retry-After says when to try again",
    503: "The service is busy; Retry-After says when to try again",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of an operation, for the argument `responses` of a route."""
    return {status: {"model": Error, "description": _REASONS[status]} for status in statuses}


def answer_limit(most: int) -> str:
    """The limit on the size of answers, for the argument `description` of a route."""
    return (
        f"An answer has {most:,} values at most, counted before it is computed: the classes or "
        "numbers of each task, the pixels of a mask, the numbers of a vector, for every image. "
        "Beyond that, the status is 422."
    )


def request_body(schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A required body, by content type, for the argument `openapi_extra` of a route."""
    content = {kind: {"schema": _inlined(schema, schema)} for kind, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(part: Any, schema: dict[str, Any]) -> Any:
    """The schema with its definitions in place: references would look for them elsewhere."""
    if isinstance(part, list):
        return [_inlined(one, schema) for one in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        found = schema["$defs"][part["$ref"].rpartition("/")[2]]
        part = {**found, **{key: value for key, value in part.items() if key != "$ref"}}
    return {key: _inlined(value, schema) for key, value in part.items() if key != "$defs"}
