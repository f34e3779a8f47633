"""Ctrl-C in the middle of a stream: its client gets a typed error event before the connection
ends, and the terminal says how long that may take."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from pd_operator.local.cluster import ANSWERS_S
from tests.client import request
from tests.cluster import Cluster, spec
from tests.e2e.asking import COMPLETIONS, body

PACE = "0.1,0,0"
"""Ten tokens a second: the answer is far from its end when the time is over."""


def template(root: Path) -> dict[str, Any]:
    # What begins like a path is looked for among the pod's mounts.
    values = {"PYTHONPATH": f":{root / 'tests' / 'e2e' / 'paced'}:{root}", "PD_TEST_PACE": PACE}
    env = [{"name": name, "value": value} for name, value in values.items()]
    return {"spec": {"containers": [{"name": "engine", "env": env}]}}


async def cut_by_ctrl_c(cluster: Cluster) -> list[str]:
    """The events of a stream in the middle of which it comes."""
    async with asyncio.timeout(60):
        content = body("The river", 1000, stream=True)
        response = await request("127.0.0.1", cluster.port, "POST", COMPLETIONS, content)
        seen: list[str] = []
        async for _, data in response.events():
            seen.append(data)
            if len(seen) == 5:
                cluster.process.send_signal(signal.SIGINT)
        await response.close()
        return seen


@pytest.mark.timeout(180)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stream_ends_with_an_error_event(
    model: Path, root: Path, tmp_path: Path, processes: int
) -> None:
    pool = {"replicas": 1, "template": template(root)}
    made = spec(model, colocated=pool, router={"processes": processes})
    cluster = Cluster.start(made, tmp_path)
    try:
        cluster.pods()
        *texts, last = asyncio.run(cut_by_ctrl_c(cluster))
        assert json.loads(last)["error"]["code"] == "draining"
        # It wasn't failed at once: answers that are nearly over reach their end.
        assert len(texts) > 10
        assert all("choices" in json.loads(data) for data in texts)
        assert cluster.process.wait(30) == 0
        cluster.drain_output()
        cluster.assert_nothing_left()
        assert any(f"running answers have {ANSWERS_S:g} s" in line for line in cluster.printed)
    finally:
        cluster.destroy()
