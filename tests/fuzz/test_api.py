"""Covers the clients' port as a whole: whatever its OpenAPI document describes, and what it
doesn't, asked of real processes by schemathesis for a while."""

import pytest

from tests.fuzz import api

_THE_SAME = ("--seed", "1")
"""`make fuzz` asks something else each time; a commit that passed here passes again."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_answer_is_one_that_the_document_describes() -> None:
    with api.cluster() as running:
        outcome = api.run(running, "--max-time", "20", "--max-examples", "25", *_THE_SAME)
    assert outcome.code == 0, outcome.output
    assert outcome.answers["200"], "nothing was asked that could be answered"
    assert not [status for status in outcome.answers if int(status) >= 500]
