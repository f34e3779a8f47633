"""Typed failures: each kind has exactly one HTTP status, unknown ones from the wire survive."""

import pytest

from pd_core.failures import Failure, FailureKind, RequestFailure


@pytest.mark.parametrize("kind", list(FailureKind))
def test_each_kind_has_traits(kind: FailureKind) -> None:
    traits = Failure(kind, "x").traits
    assert 400 <= traits.http_status < 600
    is_client = traits.http_status < 500 and traits.http_status != 429
    assert (traits.openai_type == "invalid_request_error") == is_client
    assert (traits.retry_after_s is not None) == (traits.http_status in (429, 503))


@pytest.mark.parametrize("kind", list(FailureKind))
def test_a_kind_survives_the_wire(kind: FailureKind) -> None:
    assert Failure.from_wire(kind.value, "m") == Failure(kind, "m")


def test_a_kind_of_a_newer_version_becomes_internal_and_keeps_its_name() -> None:
    failure = Failure.from_wire("quantum_flux", "oh")
    assert failure == Failure(FailureKind.INTERNAL, "quantum_flux: oh")


def test_request_failure_carries_the_failure() -> None:
    error = RequestFailure(FailureKind.OVERLOADED, "queue is full")
    assert error.failure == Failure(FailureKind.OVERLOADED, "queue is full")
    assert "queue is full" in str(error)
