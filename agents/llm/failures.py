"""What can go wrong with an answer, each called what it is."""

from __future__ import annotations

from enum import StrEnum


class Failure(StrEnum):
    """Why an attempt gave no decision.

    The first group happens on the way, the second is said by the HTTP status, the third is in
    what the endpoint answered.
    """

    CONNECTION = "connection"  # refused, reset, no such host, broken off, TLS
    TIMEOUT = "timeout"  # no whole answer in time
    TOO_LARGE = "too_large"  # more than max_response_bytes
    CLIENT = "client"  # whatever else the HTTP client raised

    REDIRECT = "redirect"  # 3xx, never followed
    UNAUTHORIZED = "unauthorized"  # 401, 403
    NOT_FOUND = "not_found"  # 404
    RATE_LIMITED = "rate_limited"  # 429
    BAD_REQUEST = "bad_request"  # any other 4xx, and 501
    SERVER_ERROR = "server_error"  # any other 5xx

    NOT_JSON = "not_json"  # a body that is not JSON
    NOT_A_COMPLETION = "not_a_completion"  # JSON of another form
    NO_ANSWER = "no_answer"  # no choices, no content, a refusal
    CUT_OFF = "cut_off"  # max_tokens ended it
    UNREADABLE = "unreadable"  # content in which no answer can be found
    WRONG_TENANTS = "wrong_tenants"  # missing, unknown or repeated tenants
    WRONG_TYPE = "wrong_type"  # a change that is not a whole number
    OUT_OF_RANGE = "out_of_range"  # beyond max_delta


RETRIED = frozenset(
    {
        Failure.CONNECTION,
        Failure.TOO_LARGE,
        Failure.CLIENT,
        Failure.SERVER_ERROR,
        Failure.NOT_JSON,
        Failure.NOT_A_COMPLETION,
        Failure.NO_ANSWER,
        Failure.CUT_OFF,
        Failure.UNREADABLE,
        Failure.WRONG_TENANTS,
        Failure.WRONG_TYPE,
        Failure.OUT_OF_RANGE,
    }
)
"""Asking again at once may help; after the others the next control interval is soon enough."""

FORM_IGNORED = frozenset({Failure.BAD_REQUEST, Failure.NO_ANSWER, Failure.UNREADABLE})
"""The endpoint seems not to know the form of output that was asked for."""
