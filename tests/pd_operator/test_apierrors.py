"""What a response that isn't a success means, by the bodies that a 1.34 API server sends."""

import json
from typing import Any

import pytest

from pd_operator import apierrors
from pd_operator.apierrors import ApiError

CASES: list[tuple[int, dict[str, Any], type[ApiError]]] = [
    (404, {"reason": "NotFound"}, apierrors.NotFound),
    (409, {"reason": "Conflict"}, apierrors.Conflict),
    (409, {"reason": "AlreadyExists"}, apierrors.AlreadyExists),
    (410, {"reason": "Expired"}, apierrors.Gone),
    (429, {"reason": "TooManyRequests"}, apierrors.Throttled),
    (403, {"reason": "Forbidden"}, apierrors.Forbidden),
    (401, {"reason": "Unauthorized"}, apierrors.Unavailable),
    (422, {"reason": "Invalid"}, apierrors.Invalid),
    (422, {"details": {"causes": [{"field": "metadata.uid"}]}}, apierrors.Conflict),
    (400, {"reason": "BadRequest"}, apierrors.Invalid),
    (500, {"reason": "InternalError"}, apierrors.Unavailable),
    (500, {"message": "failed to create typed patch object (…)"}, apierrors.Invalid),
    (503, {"reason": "ServiceUnavailable"}, apierrors.Unavailable),
    (
        504,
        {"reason": "Timeout", "details": {"causes": [{"reason": "ResourceVersionTooLarge"}]}},
        apierrors.VersionAhead,
    ),
]


@pytest.mark.parametrize(("code", "status", "kind"), CASES)
def test_each_kind(code: int, status: dict[str, Any], kind: type[ApiError]):
    error = apierrors.from_response(code, {}, json.dumps(status).encode())
    assert type(error) is kind
    assert error.code == code


def test_when_to_come_back():
    error = apierrors.from_response(429, {"Retry-After": "7"}, b"{}")
    assert error.retry_after_s == 7
    body = json.dumps({"details": {"retryAfterSeconds": 3}}).encode()
    assert apierrors.from_response(504, {}, body).retry_after_s == 3
    assert apierrors.from_response(503, {"Retry-After": "Wed, 21 Oct"}, b"{}").retry_after_s == 0


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"\xff\xfe", b'"text"'])
def test_a_body_that_is_no_status(body: bytes):
    assert type(apierrors.from_response(502, {}, body)) is apierrors.Unavailable


def test_an_error_in_the_middle_of_a_watch():
    assert type(apierrors.from_status({"code": 410, "reason": "Expired"})) is apierrors.Gone
    assert type(apierrors.from_status({"message": "etcd"})) is apierrors.Unavailable
