"""What all described things share: the strict model, bounded number types, readable errors."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveSeconds = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
NonNegativeSeconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]


class Model(BaseModel):
    """A frozen pydantic model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


def explain_error(item: Any) -> str:
    """One pydantic error as `path: got VALUE; what is accepted`."""
    path = ".".join(str(part) for part in item["loc"]) or "scenario"
    if item["type"].startswith("union_tag_"):
        path += "." + item["ctx"]["discriminator"].strip("'")
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown key"
    if item["type"] == "missing":
        return f"{path}: missing, a value is required"
    message = str(item["msg"]).removeprefix("Value error, ")
    value = item["ctx"]["tag"] if item["type"] == "union_tag_invalid" else item["input"]
    if isinstance(value, dict | list | tuple) or item["type"] == "value_error":
        return f"{path}: {message}"
    return f"{path}: got {value!r}; {message}"
