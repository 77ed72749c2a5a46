"""Requests and responses of the Open Inference Protocol (KServe v2, Triton)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from engram.serve.routes.schemas import MAX_TASKS

IMAGE, PIXELS = "image", "pixel_values"
LOGITS = ":logits"  # after the name of a task: the output it makes a mask of

Count = Annotated[int, Field(ge=0, le=10**12)]  # with more digits, a number is an attack
OutputName = Annotated[str, Field(max_length=64 + len(LOGITS))]


class _Part(BaseModel):
    """A part of a request; what it has beyond these fields is for other servers."""

    model_config = ConfigDict(extra="ignore", strict=True)


class InputParameters(_Part):
    binary_data_size: Annotated[
        Count | None, Field(description="Bytes of this tensor after the JSON")
    ] = None


class InferInput(_Part):
    name: Annotated[
        Literal["image", "pixel_values"],
        Field(description="Encoded images as BYTES, or normalised pixels as FP32"),
    ]
    shape: Annotated[list[Count], Field(min_length=1, max_length=4)]
    datatype: Annotated[str, Field(max_length=20)]
    parameters: InputParameters = InputParameters()
    data: Annotated[list[Any] | None, Field(description="Flat or nested; images are in base64")] = (
        None
    )


class OutputParameters(_Part):
    binary_data: Annotated[
        bool | None, Field(description="Whether the tensor follows the JSON as bytes")
    ] = None
    classification: Annotated[
        int | None,
        Field(ge=1, le=1000, description="Return so many classes, as probability:index:class"),
    ] = None


class InferOutput(_Part):
    name: Annotated[
        OutputName,
        Field(description=f"A task, or a segmentation with {LOGITS} for its logits"),
    ]
    parameters: OutputParameters = OutputParameters()


class RequestParameters(_Part):
    binary_data_output: Annotated[
        bool, Field(description="Whether tensors follow the JSON as bytes")
    ] = False


class InferOptions(BaseModel):
    """What a request asks for."""

    id: str | None
    outputs: list[InferOutput] | None  # None: all of the model
    binary: bool

    def wants_binary(self, output: InferOutput) -> bool:
        own = output.parameters.binary_data
        return self.binary if own is None else own


class InferRequest(_Part):
    id: Annotated[str | None, Field(max_length=200)] = None
    parameters: RequestParameters = RequestParameters()
    inputs: Annotated[list[InferInput], Field(min_length=1, max_length=1), FailFast()]
    outputs: Annotated[
        list[InferOutput] | None,
        Field(
            min_length=1,
            max_length=MAX_TASKS,
            description="Each once; default: all tasks, and masks of segmentations",
        ),
        FailFast(),
    ] = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = self.inputs[0]
        if (given.data is None) == (given.parameters.binary_data_size is None):
            raise ValueError("an input has either data or binary_data_size")
        return self

    def options(self) -> InferOptions:
        return InferOptions(
            id=self.id, outputs=self.outputs, binary=self.parameters.binary_data_output
        )


class OutputTensor(BaseModel):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class InferResponse(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    name: str
    versions: Annotated[list[str], Field(description="Changes with what the model answers")]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class ServerLive(BaseModel):
    live: bool


class ServerReady(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool
