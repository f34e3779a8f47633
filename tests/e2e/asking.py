"""What the end-to-end tests ask of a cluster, and how they check the answers."""

import asyncio
from collections.abc import Sequence
from typing import Any

from pd_core.failures import FailureKind
from tests.client import Streamed, follow, request
from tests.cluster import Cluster
from tests.reference import Reference

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def body(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy completion that doesn't stop early."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


def text_of(tokens: int, number: int = 0) -> str:
    """A prompt of roughly so many tokens of the tiny model, different for each number."""
    words = (f"{number + i} boats go out to the sea and come back with fish, " for i in range(999))
    return "".join(words)[: tokens * 3]


async def post(cluster: Cluster, path: str, content: Any) -> tuple[int, Any]:
    """(status, JSON) of one request that isn't streamed."""
    response = await request("127.0.0.1", cluster.port, "POST", path, content)
    try:
        return response.status, await response.json()
    finally:
        await response.close()


def ask(cluster: Cluster, content: dict[str, Any], path: str = COMPLETIONS) -> tuple[int, Any]:
    async def bounded() -> tuple[int, Any]:
        async with asyncio.timeout(60):
            return await post(cluster, path, content)

    return asyncio.run(bounded())


def text(cluster: Cluster, content: dict[str, Any]) -> str:
    status, answer = ask(cluster, content)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def expected(reference: Reference, content: dict[str, Any]) -> str:
    new = reference.generate(content["prompt"], content["max_tokens"], ignore_eos=True)
    return reference.decode(new)


def exactly(reference: Reference, tokens: int) -> str:
    """A prompt of exactly so many tokens."""
    ids = reference.ids(text_of(2 * tokens + 50, number=tokens))
    for start in range(len(ids) - tokens):
        candidate = reference.decode(ids[start : start + tokens])
        if len(reference.ids(candidate)) == tokens:
            return candidate
    raise AssertionError(f"no prompt of {tokens} tokens")


class Streams:
    """Several streams at once, which a test can watch while they run."""

    def __init__(self, cluster: Cluster, contents: Sequence[dict[str, Any]]) -> None:
        self.contents = contents
        self.results = [Streamed() for _ in contents]
        self._tasks = [
            asyncio.create_task(self._run(cluster, c, r))
            for c, r in zip(contents, self.results, strict=True)
        ]

    async def _run(self, cluster: Cluster, content: dict[str, Any], result: Streamed) -> None:
        try:
            async for _ in follow("127.0.0.1", cluster.port, COMPLETIONS, content, result):
                pass
        except (ConnectionError, asyncio.IncompleteReadError) as broken:
            result.error = {"message": f"the connection broke: {broken!r}", "code": "broken"}

    async def until_each_has(self, events: int, deadline_s: float = 60.0) -> None:
        async with asyncio.timeout(deadline_s):
            while any(len(r.times) < events and r.error is None for r in self.results):
                await asyncio.sleep(0.002)

    async def until_any_has(self, events: int, deadline_s: float = 60.0) -> None:
        async with asyncio.timeout(deadline_s):
            while not any(len(r.times) >= events for r in self.results):
                await asyncio.sleep(0.002)

    async def end(self, deadline_s: float) -> list[Streamed]:
        """All results; a request that is still open at the deadline fails the test."""
        async with asyncio.timeout(deadline_s):
            await asyncio.gather(*self._tasks)
        return self.results


def assert_right_or_typed(result: Streamed, want: str) -> None:
    """The whole right answer, or exactly one typed error after a right beginning."""
    if result.error is None:
        assert result.done
        assert result.text == want
        return
    assert not result.done
    assert result.error["code"] in set(FailureKind), result.error
    assert result.error["message"]
    assert want.startswith(result.text)
