"""Covers rendering: what the chart says about policies and monitors, and what is wrong with it."""

import json
from typing import Any

import pytest

from pd_operator import flags, rendering
from pd_operator.podparts import Peer, Settings

WHOLE: dict[str, Any] = {
    "networkPolicies": {
        "enabled": True,
        "operators": [{"namespaceLabels": {"a": "b"}, "podLabels": {"c": "d"}}],
        "clients": [{"namespaceLabels": {"team": "x"}}],
        "monitors": [{}],
    },
    "monitors": {
        "enabled": False,
        "podMonitor": True,
        "rules": False,
        "labels": {"release": "prometheus"},
        "runbooks": "https://wiki.example",
    },
    "certificates": {"enabled": True},
    "rdmaResource": "rdma/hca",
}


def test_all_of_it() -> None:
    made = rendering.parse(json.dumps(WHOLE), Settings(engine_image="e", certificates=False))
    assert made.operators == (Peer({"a": "b"}, {"c": "d"}),)
    assert made.clients == (Peer({"team": "x"}),)
    assert made.monitors_from == (Peer(),)
    assert (made.network_policies, made.monitors) == (True, False)
    assert (made.pod_monitor, made.rules) == (True, False)
    assert made.certificates
    assert made.runbooks == "https://wiki.example"
    assert made.monitor_labels == {"release": "prometheus"}
    assert (made.engine_image, made.rdma_resource) == ("e", "rdma/hca")


def test_nothing_is_the_defaults() -> None:
    assert rendering.parse("{}", Settings()) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "not a mapping"),
        ('{"networkPolicies": {"enabled": "yes"}}', "networkPolicies.enabled: is 'yes'"),
        ('{"networkPolicies": {"clients": {}}}', "networkPolicies.clients: is a mapping"),
        ('{"networkPolicies": {"clients": [{"pods": {}}]}}', "clients[0].pods: is not a known"),
        ('{"monitors": {"labels": {"a": 1}}}', "monitors.labels.a: is 1"),
        ('{"monitors": {"rules": "no"}}', "monitors.rules: is 'no'"),
        ('{"certificates": {"enabled": 1}}', "certificates.enabled: is 1"),
        ('{"rdmaResource": 3}', "rdmaResource: is 3"),
        ('{"else": 1}', "else: is not a known field"),
    ],
)
def test_mistakes_are_said(text: str, message: str) -> None:
    with pytest.raises(rendering.InvalidRendering) as told:
        rendering.parse(text, Settings())
    assert message in str(told.value)


def test_the_operators_flags_take_it() -> None:
    made = flags.parse(["--cluster-wide", "--rendering", json.dumps(WHOLE), "--router-image=r"])
    assert made.options.settings.clients == (Peer({"team": "x"}),)
    assert made.options.settings.router_image == "r"
    assert not made.options.settings.host_paths
    with pytest.raises(SystemExit, match=r"--rendering: else"):
        flags.parse(["--cluster-wide", "--rendering", '{"else": 1}'])
