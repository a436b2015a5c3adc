"""What all described things share: the strict model, bounded number types, readable errors."""

from __future__ import annotations

from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field
from yaml import YAMLError

__all__ = [
    "Model",
    "NonNegativeSeconds",
    "PositiveSeconds",
    "Tokens",
    "YAMLError",
    "explain_error",
    "parse_yaml",
]

PositiveSeconds = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
NonNegativeSeconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]


class Model(BaseModel):
    """A frozen pydantic model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class _UniqueKeysLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if (key.tag, key.value) in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key.value}' is there twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """What a YAML text holds, in plain Python types.

    Raises:
        YAMLError: not YAML, or a mapping with a key twice, or nested too deeply to be read.
    """
    try:
        return yaml.load(text, _UniqueKeysLoader)
    except RecursionError as error:
        raise YAMLError("nested too deeply") from error


def explain_error(item: Any) -> str:
    """One pydantic error as `path: got VALUE; what is accepted`."""
    parts = [str(part) for part in item["loc"]]
    if item["type"].startswith("union_tag_"):
        parts.append(item["ctx"]["discriminator"].strip("'"))
    # a union's tag is a part too: engine.engine.profile where the engine's fidelity is "engine"
    path = ".".join(part for i, part in enumerate(parts) if i == 0 or part != parts[i - 1])
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown key"
    if item["type"] == "missing":
        return f"{path}: missing, a value is required"
    message = str(item["msg"]).removeprefix("Value error, ")
    value = item["ctx"]["tag"] if item["type"] == "union_tag_invalid" else item["input"]
    if isinstance(value, dict | list | tuple) or item["type"] == "value_error":
        return f"{path}: {message}" if path else message
    return f"{path}: got {value!r}; {message}"
