"""Conversations of eight turns, by where the decode worker keeps their KV between the turns:
in its pool, in host memory, on disk (and the worker is restarted before the last turn), or
nowhere. What a user feels is the time to the first token of turn 8. `pulled`: it's in decode's
pool, and every prompt is computed by prefill, which has it copied from there.

Prefill keeps nothing in any of them, so whatever is spared is decode's doing, and between two
turns the pool is emptied where it shouldn't help. `bytes_over_new`: with every prompt
prefilled elsewhere, what goes over the wire in a turn against the blocks that decode lacks.
"""

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import Goal, arguments, median, report, table
from bench.models import load_tokenizer, model_dir, prompt_of
from pd_core.geometry import model_kv
from tests.client import Streamed, stream
from tests.cluster import Cluster, Pod, http_get, serving, spec

GOALS = {
    "device_ttft_ratio": Goal("<=", 0.3),
    "host_ttft_ratio": Goal("<=", 0.4),
    "disk_ttft_ratio": Goal("<=", 0.6),
    "pulled_ttft_ratio": Goal("<=", 0.4),
    "bytes_over_new": Goal("<=", 1.05),
}
BLOCK_TOKENS = 16
_NOTHING: dict[str, Any] = {"retention": {"maxShare": 0.0001}}
_RETENTION: dict[str, dict[str, Any]] = {
    "nowhere": _NOTHING,
    "device": {},
    "host": {"retention": {"maxShare": 0.0001, "hostMemory": "2Gi"}},
    "disk": {"retention": {"maxShare": 0.0001, "hostMemory": "2Gi", "disk": "4Gi"}},
    "pulled": {},
}
_HEARTBEAT_S = 1.2
_IN_ITS_POOL = ("device", "pulled")


@dataclass(frozen=True, slots=True)
class Plan:
    conversations: int
    turns: int
    document_tokens: int  # of the first question
    question_tokens: int
    answer_tokens: int


FULL = Plan(5, 8, 2000, 100, 32)
QUICK = Plan(1, 3, 400, 40, 8)


@dataclass(slots=True)
class Conversation:
    """What both have said, and what each turn took."""

    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Streamed] = field(default_factory=list)

    def ask(self, cluster: Cluster, question: str, answer_tokens: int) -> Streamed:
        self.messages.append({"role": "user", "content": question})
        body = {
            "model": "tiny",
            "messages": self.messages,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        answer = asyncio.run(stream("127.0.0.1", cluster.port, "/v1/chat/completions", body))
        if not answer.done or answer.usage is None:
            raise RuntimeError(f"no answer: {answer.error or answer}")
        self.messages.append({"role": "assistant", "content": answer.text})
        self.turns.append(answer)
        return answer


class Site:
    """A cluster whose decode worker keeps KV in one way."""

    def __init__(self, cluster: Cluster, where: str, plan: Plan, questions: Iterator[str]) -> None:
        self.cluster = cluster
        self.where = where
        self.plan = plan
        self._questions = questions

    def converse(self) -> Conversation:
        talk = Conversation()
        for turn in range(self.plan.turns):
            if turn:
                self._between()
            if self.where == "disk" and turn == self.plan.turns - 1:
                self._restart()
            talk.ask(self.cluster, next(self._questions), self.plan.answer_tokens)
        return talk

    def _between(self) -> None:
        """Until the pool has let go of what it isn't to keep."""
        self.cluster.until(lambda: all(map(self._idle, self.cluster.workers())), "pools at rest")
        if self.where == "pulled":
            time.sleep(_HEARTBEAT_S)  # routers hear of what is where

    def _idle(self, pod: Pod) -> bool:
        blocks = self.cluster.blocks(pod)
        keeps = pod.pool == "decode" and self.where in _IN_ITS_POOL
        return blocks["active"] == 0 and (keeps or blocks["cached"] == 0)

    def _restart(self) -> None:
        pod = self.cluster.pod("decode")
        self.cluster.kill(pod.pid, signal.SIGTERM)

        def back() -> bool:
            now = self.cluster.pod("decode")
            return now.pid != pod.pid and now.ready and self.cluster.all_ready()

        self.cluster.until(back, "the decode worker is back", 120.0)
        self.cluster.until(self._known, "the router knows what it kept", 30.0)

    def _known(self) -> bool:
        router = self.cluster.pod("router")
        page = json.loads(http_get(f"http://{router.ip}:9090/debug/workers")[1])
        return all(worker["usable"] for worker in page["workers"]) and len(page["workers"]) == 2


@contextmanager
def site(
    folder: Path, where: str, plan: Plan, questions: Iterator[str], prefill: dict[str, Any]
) -> Iterator[Site]:
    """`prefill`: engine settings of the prefill worker."""
    made = spec(
        folder,
        prefill={"replicas": 1, "engine": {"threads": 1, **prefill}},
        decode={"replicas": 1, "engine": {"threads": 1, **_RETENTION[where]}},
    )
    if not prefill or where == "pulled":
        made["spec"]["router"] = {"routing": {"disaggregate": "always"}}
    with tempfile.TemporaryDirectory() as work, serving(made, Path(work)) as cluster:
        yield Site(cluster, where, plan, questions)


def ttft_of(folder: Path, where: str, plan: Plan, questions: Iterator[str]) -> list[list[float]]:
    """By conversation, the seconds to the first token of each turn."""
    with site(folder, where, plan, questions, _NOTHING) as one:
        talks = [one.converse() for _ in range(plan.conversations)]
    return [[turn.ttft_s for turn in talk.turns] for talk in talks]


def bytes_over_new(folder: Path, plan: Plan, questions: Iterator[str]) -> float:
    """The worst of all turns but the first: KV bytes that decode took in, against what it
    lacked, in whole blocks."""
    config = json.loads((folder / "config.json").read_text())
    block_bytes = BLOCK_TOKENS * model_kv(config, "float32").token_bytes
    worst, talk = 0.0, Conversation()
    with site(folder, "device", plan, questions, {}) as one:
        known_tokens = 0
        for turn in range(plan.turns):
            before = _bytes_in(one.cluster)
            usage = talk.ask(one.cluster, next(questions), plan.answer_tokens).usage or {}
            one.cluster.until_settled()
            sent, prompt = _bytes_in(one.cluster) - before, int(usage["prompt_tokens"])
            new_blocks = -(-prompt // BLOCK_TOKENS) - known_tokens // BLOCK_TOKENS
            if turn:
                worst = max(worst, sent / (new_blocks * block_bytes))
            # The last token's KV is never computed.
            known_tokens = prompt + int(usage["completion_tokens"]) - 1
    return worst


def _bytes_in(cluster: Cluster) -> float:
    samples = cluster.metrics(cluster.pod("decode")).get("pdcluster_engine_kv_bytes_total", {})
    return sum(value for labels, value in samples.items() if dict(labels)["direction"] == "in")


def main(quick: bool) -> None:
    plan = QUICK if quick else FULL
    folder = model_dir()
    tokenizer = load_tokenizer(folder)

    def questions(seed: int) -> Iterator[str]:
        number = seed
        while True:
            first = (number - seed) % plan.turns == 0
            tokens = plan.document_tokens if first else plan.question_tokens
            yield prompt_of(tokenizer, tokens, number)
            number += 1

    found = {where: ttft_of(folder, where, plan, questions(1000)) for where in _RETENTION}
    by_turn = {
        where: [median(turn) for turn in zip(*talks, strict=True)] for where, talks in found.items()
    }
    rows = [
        (turn + 1, *(times[turn] * 1000 for times in by_turn.values()))
        for turn in range(plan.turns)
    ]
    print(table(("turn", *(f"{where} ms" for where in by_turn)), rows), flush=True)
    none = by_turn["nowhere"][-1]
    metrics = {f"{w}_ttft_ratio": by_turn[w][-1] / none for w in by_turn if w != "nowhere"}
    metrics["bytes_over_new"] = bytes_over_new(folder, plan, questions(5000))
    report("turns", metrics, GOALS, quick)


if __name__ == "__main__":
    main(arguments(__doc__))
