"""From the body of a response to bounded changes, or to what is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from vllm_tenant_tuning.agents.llm.failures import Failure

TOOL_NAME = "change_caps"

MAX_OBJECTS = 64
"""How many opening braces of a text are tried: what has more is no answer."""

MAX_REPORTED_TOKENS = 10_000_000
"""An endpoint that reports more of them for one answer is not believed."""


class AnswerError(ValueError):
    """An answer that is no decision.

    Attributes:
        failure: what it counts as.
    """

    def __init__(self, failure: Failure, explanation: str) -> None:
        super().__init__(explanation)
        self.failure = failure


class _Function(BaseModel):
    name: str
    arguments: str


class _ToolCall(BaseModel):
    function: _Function


class _Message(BaseModel):
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: list[_Choice]


_Tokens = Annotated[int, Field(strict=True, ge=0, le=MAX_REPORTED_TOKENS)]


class Usage(BaseModel):
    """The tokens of one response, as the endpoint reports them."""

    prompt_tokens: _Tokens
    completion_tokens: _Tokens


@dataclass(frozen=True)
class Answer:
    """A valid answer.

    Attributes:
        deltas: a change for each tenant, within `max_delta` either way.
        reason: what the model gave as its reason, cut to 500 characters.
    """

    deltas: tuple[int, ...]
    reason: str | None


def failure_of_status(status: int) -> Failure | None:
    """What an HTTP status says; None for success."""
    if 200 <= status < 300:
        return None
    if 300 <= status < 400:
        return Failure.REDIRECT
    named = {
        401: Failure.UNAUTHORIZED,
        403: Failure.UNAUTHORIZED,
        404: Failure.NOT_FOUND,
        429: Failure.RATE_LIMITED,
        501: Failure.BAD_REQUEST,
    }
    return named.get(status, Failure.BAD_REQUEST if status < 500 else Failure.SERVER_ERROR)


def read_usage(body: str) -> Usage | None:
    """The tokens that a response reports; None where it reports none that can be believed."""
    try:
        content = _loads(body)
        return Usage.model_validate(content["usage"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def read_answer(body: str, ids: Sequence[str], max_delta: int) -> Answer:
    """Read and check a response.

    A tool call is read strictly. Content may be the object alone, or text around it (a Markdown
    fence, reasoning): then the last object counts. Where there is no object at all, each tenant
    must stand once as `t1: +1` or `t1 = 1`.

    Args:
        body: of the response.
        ids: what answers call the tenants.
        max_delta: the largest change.

    Raises:
        AnswerError: anything else.
    """
    try:
        content = _loads(body)
    except (ValueError, RecursionError):
        raise AnswerError(Failure.NOT_JSON, "the response was not JSON") from None
    try:
        completion = _Completion.model_validate(content)
    except (ValidationError, RecursionError):
        raise AnswerError(Failure.NOT_A_COMPLETION, "the response was no chat completion") from None
    if not completion.choices:
        raise AnswerError(Failure.NO_ANSWER, "the response had no choices")
    choice = completion.choices[0]
    message = choice.message
    try:
        if message.tool_calls:
            return _from_tool_calls(message.tool_calls, ids, max_delta)
        whole = choice.finish_reason != "length"
        return _from_text(message.content or "", ids, max_delta, whole)
    except AnswerError as error:
        if choice.finish_reason == "length":
            raise AnswerError(Failure.CUT_OFF, "the answer was too long and cut off") from error
        raise


def _from_tool_calls(calls: list[_ToolCall], ids: Sequence[str], max_delta: int) -> Answer:
    if len(calls) != 1 or calls[0].function.name != TOOL_NAME:
        raise AnswerError(Failure.UNREADABLE, f"exactly one call of {TOOL_NAME} was expected")
    try:
        content = _loads(calls[0].function.arguments)
    except AnswerError:
        raise
    except (ValueError, RecursionError):
        raise AnswerError(Failure.UNREADABLE, "the arguments were not JSON") from None
    return _checked(content, ids, max_delta)


def _from_text(text: str, ids: Sequence[str], max_delta: int, whole: bool) -> Answer:
    text = text.rpartition("</think>")[2].strip()
    if not text:
        raise AnswerError(Failure.NO_ANSWER, "the answer was empty")
    try:
        return _checked(_loads(text), ids, max_delta)
    except (json.JSONDecodeError, RecursionError):
        pass
    except AnswerError:
        raise
    except ValueError:  # a number of thousands of digits
        raise AnswerError(Failure.OUT_OF_RANGE, _range(max_delta)) from None
    found = _objects(text)
    if found:
        return _checked(found[-1], ids, max_delta)
    if not whole:  # the last number may lack digits
        raise AnswerError(Failure.CUT_OFF, "the answer was cut off")
    return _from_prose(text, ids, max_delta)


def _objects(text: str) -> list[Any]:
    """The JSON objects in a text, in order, none inside another."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    found = []
    position = text.find("{")
    for _ in range(MAX_OBJECTS):
        if position < 0:
            break
        try:
            content, end = decoder.raw_decode(text, position)
            found.append(content)
        except AnswerError:
            raise
        except (ValueError, RecursionError):
            end = position + 1
        position = text.find("{", end)
    return found


def _from_prose(text: str, ids: Sequence[str], max_delta: int) -> Answer:
    pairs = re.findall(r"\b(t\d{1,3})[\"'*`]{0,3}[ ]?[:=][ ]?([+-]?\d{1,4})(?!\w|\.\d)", text)
    values = {(name, int(value)) for name, value in pairs}
    if not values:
        raise AnswerError(Failure.UNREADABLE, "no JSON object was found in the answer")
    return _checked(_unique(sorted(values)), ids, max_delta)


def _checked(content: Any, ids: Sequence[str], max_delta: int) -> Answer:
    if not isinstance(content, dict):
        raise AnswerError(Failure.UNREADABLE, "the answer was not a JSON object")
    reason = content.get("reason")
    changes = {key: value for key, value in content.items() if key != "reason"}
    if set(changes) != set(ids):
        raise AnswerError(
            Failure.WRONG_TENANTS, f"the keys must be exactly {', '.join(ids)}, each once"
        )
    try:
        checked = _ADAPTER.validate_python(changes)
    except ValidationError:
        raise AnswerError(
            Failure.WRONG_TYPE, "each change must be a whole number, not quoted"
        ) from None
    deltas = tuple(checked[id_] for id_ in ids)
    if any(abs(delta) > max_delta for delta in deltas):
        raise AnswerError(Failure.OUT_OF_RANGE, _range(max_delta))
    if not isinstance(reason, str):
        return Answer(deltas, None)
    return Answer(deltas, reason[:500].encode("utf-8", "replace").decode())


def _range(max_delta: int) -> str:
    return f"each change must be from {-max_delta} to {max_delta}"


def _loads(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a tenant that stands in it twice is refused."""
    content = dict(pairs)
    if len(content) < len(pairs) and any(re.fullmatch(r"t\d+", key) for key, _ in pairs):
        raise AnswerError(Failure.WRONG_TENANTS, "a tenant must stand once in the answer")
    return content


_ADAPTER = TypeAdapter(dict[str, Annotated[int, Field(strict=True)]])
