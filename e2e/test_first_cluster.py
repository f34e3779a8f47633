"""Story: install with Helm, apply one object, ask it something, look at it, delete it."""

import asyncio
import json
import re
from collections.abc import Coroutine
from typing import Any

import pytest
import yaml

from e2e import network
from e2e.cluster.api import wait_for
from e2e.site import BUILTIN_MODEL, HTTP_PORT, PDCLUSTER, Site, document, pool
from pd_core.failures import FailureKind
from tests import client
from tests.reference import Reference

NAME = "chat"
GREETING = [{"role": "user", "content": "What is the capital of France?"}]
OWNED = "statefulsets,deployments,services,serviceaccounts,pdb,networkpolicies,pdpools,pods"


def ask(site: Site, namespace: str, body: dict[str, Any]) -> tuple[int, Any]:
    """One chat through the Service."""
    host, port = site.address(namespace, NAME)

    def work() -> Coroutine[Any, Any, tuple[int, Any]]:
        return say(host, port, "POST", "/v1/chat/completions", body)

    return network.start(site.layout.namespace_file, work).result(120)


async def say(host: str, port: int, *request: Any) -> tuple[int, Any]:
    answer = await client.request(host, port, *request)
    try:
        return answer.status, await answer.json()
    finally:
        await answer.close()


@pytest.mark.timeout(900)
def test_from_helm_install_to_an_answer_and_back_to_nothing(site: Site) -> None:
    with site.namespace() as namespace:
        made = document(
            NAME, BUILTIN_MODEL, prefill=pool(2), decode=pool(3),
            model={"name": "smollm2", "source": BUILTIN_MODEL, "dtype": "float32"},
        )  # fmt: skip
        site.kubectl("apply", "-n", namespace, "-f", "-", input=yaml.safe_dump(made))
        site.wait_ready(namespace, NAME)

        body = {"model": "smollm2", "messages": GREETING, "max_tokens": 12, "temperature": 0}
        status, answer = ask(site, namespace, body)
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == right_answer(12)
        status, answer = ask(site, namespace, {**body, "model": "other"})
        assert (status, answer["error"]["code"]) == (404, FailureKind.MODEL_NOT_FOUND)

        # As one tries it from a laptop.
        with site.forwarded(namespace, f"service/{NAME}-router", HTTP_PORT) as port:
            status, models = asyncio.run(say("127.0.0.1", port, "GET", "/v1/models"))
            assert (status, [one["id"] for one in models["data"]]) == (200, ["smollm2"])

        columns = wait_for("TTFT and TPOT", lambda: measured_columns(site, namespace), 60)
        assert columns["READY"] == "True"
        assert (columns["PREFILL"], columns["DECODE"]) == ("2/2", "3/3")
        assert columns["MODEL"] == "smollm2"

        explained = site.kubectl("explain", "pdcluster.spec.slo")
        assert "ttft" in explained
        assert "tpot" in explained
        assert "<no description>" not in explained

        site.kubectl("delete", "pdc", NAME, "-n", namespace, "--wait=true")
        left = wait_for("nothing left", lambda: nothing_left(site, namespace), 120)
        assert left
        assert site.api.items(*PDCLUSTER, namespace) == []


def right_answer(tokens: int) -> str:
    from bench.models import model_dir

    reference = Reference(model_dir(), threads=2)
    return reference.decode(reference.generate(GREETING, tokens))


def measured_columns(site: Site, namespace: str) -> dict[str, str] | None:
    """`kubectl get pdc` by column, once it has latencies."""
    head, row = site.kubectl("get", "pdc", NAME, "-n", namespace).splitlines()
    # By place: a column that is empty yet isn't there in the row's words.
    starts = [match.start() for match in re.finditer(r"\S+", head)]
    cells = [row[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
    columns = dict(zip(head.split(), cells, strict=True))
    return columns if columns["TPOT"].endswith(("ms", "s")) else None


def nothing_left(site: Site, namespace: str) -> bool:
    found = site.kubectl(
        "get", OWNED, "-n", namespace, "-l", "app.kubernetes.io/name=pdcluster", "-o", "json"
    )
    return not json.loads(found)["items"]
