"""What OpenAI's released client can send beyond `test_serving`, through real workers: each field
that changes an answer changes it as transformers would, the others leave it alone."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.cluster import Cluster
from tests.reference import Prompt, Reference

HI: Prompt = [{"role": "user", "content": "How far is the sea?"}]
TOKENS = 16


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=cluster.base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(client: OpenAI, messages: Any = HI, **options: Any) -> Any:
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    options = {"model": "tiny", "temperature": 0, "extra_body": extra, **options}
    [choice] = client.chat.completions.create(messages=messages, **options).choices
    return choice


def test_developers_messages_and_content_in_parts(client: OpenAI, reference: Reference) -> None:
    parts: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": one} for one in ("How far", "now?")]},
    ]
    read: Prompt = [
        {"role": "system", "content": "Be brief."},  # the template knows no developers
        {"role": "user", "content": "How far\nnow?"},
    ]
    assert chat(client, parts, max_tokens=TOKENS).token_ids == reference.generate(read, TOKENS)


def test_who_asks_changes_nothing_and_the_limit_has_a_new_name(
    client: OpenAI, reference: Reference
) -> None:
    answer = chat(client, max_completion_tokens=5, user="me", metadata={"for": "tests"})
    assert answer.token_ids == reference.generate(HI, 5)


@pytest.mark.parametrize(
    ("presence", "frequency"), [(2.0, 0.0), (0.0, 2.0), (-1.5, 0.0), (0.0, -0.5), (1.0, 1.0)]
)
def test_penalties_are_openais(
    client: OpenAI, reference: Reference, presence: float, frequency: float
) -> None:
    """Both go by the tokens of the answer alone, not by those of the prompt."""
    prompt_tokens = len(reference.ids(HI))

    def punished(ids: Any, scores: Any) -> Any:
        for token in ids[0, prompt_tokens:].tolist():
            scores[0, token] -= frequency
        for token in set(ids[0, prompt_tokens:].tolist()):
            scores[0, token] -= presence
        return scores

    tokens = 3 * TOKENS
    want = reference.generate(HI, tokens, ignore_eos=True, logits_processor=[punished])
    answer = chat(
        client,
        max_tokens=tokens,
        presence_penalty=presence,
        frequency_penalty=frequency,
        extra_body={"ignore_eos": True},
    )
    assert answer.token_ids == want
    assert want != reference.generate(HI, tokens, ignore_eos=True), "it has no effect"


def test_an_end_that_is_ignored(client: OpenAI, reference: Reference) -> None:
    [end] = reference.eos
    wished: Any = {"max_tokens": 5, "logit_bias": {str(end): 100}}
    stopped = chat(client, **wished)
    assert (stopped.finish_reason, stopped.message.content) == ("stop", "")
    goes_on = chat(client, **wished, extra_body={"ignore_eos": True})
    assert (goes_on.finish_reason, len(goes_on.token_ids)) == ("length", 5)


def test_an_answer_that_is_an_object(client: OpenAI, reference: Reference) -> None:
    """A random model says nothing of the kind; one that longs for braces ends what it began."""
    braces = [reference.tokenizer.convert_tokens_to_ids(brace) for brace in "{}"]
    wished: Any = {"max_tokens": 40, "logit_bias": {str(brace): 100 for brace in braces}}
    plain = chat(client, **wished)
    with pytest.raises(json.JSONDecodeError):
        json.loads(plain.message.content)
    answer = chat(client, **wished, response_format={"type": "json_object"})
    assert answer.finish_reason == "stop"
    assert json.loads(answer.message.content) == {}
