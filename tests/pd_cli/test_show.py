"""Covers pd_cli.show: what `pdcluster status` says of a cluster that isn't ready."""

from typing import Any

import pytest

from pd_cli.show import _why_not_ready

READY = {"type": "Ready", "status": "True", "reason": "AllReady", "message": ""}
ROLLING = {"type": "Ready", "status": "False", "reason": "RollingOut", "message": "decode rolls"}
FINE = {"type": "Degraded", "status": "False", "reason": "NoProblem", "message": ""}
CRASHING = {"type": "Degraded", "status": "True", "reason": "CrashLoopBackOff", "message": "d-0"}


@pytest.mark.parametrize(
    ("conditions", "lines"),
    [
        ([], []),
        ([READY, FINE], []),
        ([ROLLING, FINE], ["chat: RollingOut: decode rolls"]),
        ([ROLLING, CRASHING], ["chat: CrashLoopBackOff: d-0"]),
        ([READY, CRASHING], ["chat: CrashLoopBackOff: d-0"]),
    ],
)
def test_one_line_says_why(conditions: list[dict[str, str]], lines: list[str]) -> None:
    state: dict[str, Any] = {"name": "chat", "document": {"status": {"conditions": conditions}}}
    assert _why_not_ready([state]) == lines
