"""What all described things share: the strict model, bounded numbers, reading, readable errors."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError
from yaml import YAMLError

__all__ = [
    "Model",
    "NonNegativeSeconds",
    "PositiveSeconds",
    "Tokens",
    "YAMLError",
    "explain_error",
    "explain_errors",
    "packaged_names",
    "parse_yaml",
    "read_yaml",
]

PositiveSeconds = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
NonNegativeSeconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]


class Model(BaseModel):
    """A frozen pydantic model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, content: Any) -> Any:
        """Refuse YAML's true, yes and on where a number belongs: pydantic would take them as 1."""
        for name, value in content.items() if isinstance(content, dict) else ():
            field = cls.model_fields.get(name)
            if field is None or bool in (field.annotation, *get_args(field.annotation)):
                continue
            for part in value if isinstance(value, list | tuple) else (value,):
                if isinstance(part, bool):
                    raise PydanticCustomError(
                        "truth_value",
                        "got {value}; accepted are numbers and texts",
                        {"field": name, "value": str(part).lower()},
                    )
        return content


class _UniqueKeysLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key.value}' is there twice", key.start_mark
                )
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
    except ValueError as error:  # a date, or a number with a tag, that is none
        raise YAMLError(str(error)) from error


def packaged_names(folder: str) -> list[str]:
    """Names of the packaged YAML files in a folder of `configs`, sorted."""
    entries = (resources.files("vllm_tenant_tuning.configs") / folder).iterdir()
    return sorted(
        entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml")
    )


def read_yaml(
    kind: str, source: str | Path, packaged: Mapping[str, str], error: type[ValueError]
) -> Any:
    """What the YAML file of a packaged name or a path holds, in plain Python types.

    Args:
        kind: what is read; messages begin with it.
        source: a packaged name, or a path; the name comes first.
        packaged: folders of `configs` that names are looked for in, and how messages call one of
            their files ("a packaged scenario").
        error: what is raised.

    Raises:
        ValueError: of the class `error`: no such name or file, or one that cannot be read.
    """
    names = {folder: packaged_names(folder) for folder in packaged}
    folder = next((folder for folder in names if str(source) in names[folder]), None)
    file = Path(source)
    if folder is not None:
        entry = resources.files("vllm_tenant_tuning.configs") / folder / f"{source}.yaml"
        text = entry.read_text(encoding="utf-8")
    elif file.is_file():
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as reason:
            raise error(f"{kind} {file}: cannot be read: {reason}") from reason
    else:
        known = [f"{packaged[folder]} ({', '.join(names[folder])})" for folder in packaged]
        nor = " nor " if len(known) == 1 else ", nor "
        raise error(f"{kind}: '{source}' is neither {nor.join([*known, 'a file'])}")
    try:
        return parse_yaml(text)
    except YAMLError as reason:
        raise error(f"{kind} {file}: not YAML: {' '.join(str(reason).split())}") from reason


def explain_errors(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """All of pydantic's errors in one line.

    Args:
        error: of a validation.
        model: whose keys are named where one is unknown.
    """
    items = error.errors(include_url=False)
    lines = [explain_error(item) for item in items]
    if model is not None and any(item["type"] == "extra_forbidden" for item in items):
        lines.append(f"accepted are {', '.join(model.model_fields)}")
    return "; ".join(lines)


def explain_error(item: Any) -> str:
    """One pydantic error as `path: got VALUE; what is accepted`."""
    parts = [str(part) for part in item["loc"]]
    if item["type"].startswith("union_tag_"):
        parts.append(item["ctx"]["discriminator"].strip("'"))
    if item["type"] == "truth_value":
        parts.append(item["ctx"]["field"])
    # a union's tag is a part too: engine.engine.profile where the engine's fidelity is "engine"
    path = ".".join(part for i, part in enumerate(parts) if i == 0 or part != parts[i - 1])
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown key"
    if item["type"] == "missing":
        return f"{path}: missing, a value is required"
    message = str(item["msg"]).removeprefix("Value error, ")
    value = item["ctx"]["tag"] if item["type"] == "union_tag_invalid" else item["input"]
    if isinstance(value, dict | list | tuple) or item["type"] == "value_error":
        named = not path or message.startswith(f"{path}: ")
        return message if named else f"{path}: {message}"
    return f"{path}: got {value!r}; {message}"
