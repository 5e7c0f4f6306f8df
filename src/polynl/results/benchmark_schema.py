"""What the JSON of a benchmark must look like to be shown, compared and continued."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from polynl.config import explained
from polynl.errors import shown

Step = Literal["forward", "training"]

# Far beyond what can be measured, so that no ratio or logarithm of them overflows.
Size = Annotated[int, Field(gt=0, le=10**9)]
Count = Annotated[int, Field(gt=0, le=10**18)]
Seconds = Annotated[float, Field(gt=1e-12, le=1e12)]


def _encodable(text: str) -> str:
    # JSON can have half of a character, which cannot be printed.
    if not text.isascii() and text.encode(errors="ignore").decode() != text:
        raise ValueError(f"expected a text (got {text!r})")
    return text


def _plain(value: Any) -> Any:
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, str):
            _encodable(part)
        elif not isinstance(part, int | float | None):
            raise ValueError(f"expected a text, a number or a list of them (got {shown(value)})")
    return value


Text = Annotated[str, AfterValidator(_encodable)]
Plain = Annotated[Any, AfterValidator(_plain)]


class _Part(BaseModel):
    """Keys that are not listed are shown at most."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Settings(_Part):
    __pydantic_extra__: dict[Text, Plain]

    dtype: Text
    runs: Size
    batch: Size
    allocator_primed: bool | None = None


class _LayerSettings(_Settings):
    device: Text
    channels: list[Size]
    sides: list[Size]
    at_side: Size
    at_channels: Size
    shape: list[Annotated[list[Size], Field(min_length=4, max_length=4)]] = Field([])


class _NetSettings(_Settings):
    side: Size
    training: bool


class _Environment(_Part):
    __pydantic_extra__: dict[Text, Plain]

    variables: dict[Text, Text] = Field({})


class _Layer(_Part):
    label: Text


class _Net(_Part):
    label: Text
    parameters: Count
    multiply_adds: Count


class _Measured(_Part):
    method: Text
    step: Step
    batch: Size
    side: Size
    channels: Size | None
    width: Size | None = None
    seconds: list[Seconds]
    peak_bytes: Annotated[int, Field(ge=0, le=10**18)] | None
    skipped: Text | None


class _Benchmark(_Part):
    command: Text
    environment: _Environment
    reference: Text
    measurements: list[_Measured]


class _Layers(_Benchmark):
    settings: _LayerSettings
    methods: dict[Text, _Layer]


class _Nets(_Benchmark):
    settings: _NetSettings
    methods: dict[Text, _Net]


_KINDS: dict[str, type[_Layers] | type[_Nets]] = {"layers": _Layers, "nets": _Nets}


def benchmark_problem(content: dict[str, Any]) -> str | None:
    """The first thing that is wrong with the content of a file, or None."""
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        return f"kind: expected {' or '.join(_KINDS)} (got {shown(kind)})"
    try:
        read = _KINDS[kind].model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        return explained(".".join(map(str, problem["loc"])), problem).removesuffix(".")
    for key, name in (
        ("reference", read.reference),
        *(("measurements", m.method) for m in read.measurements),
    ):
        if name not in read.methods:
            return f"{key}: {shown(name)} is not one of its methods"
    return None
