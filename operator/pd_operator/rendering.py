"""PURE. How PDClusters are rendered on this Kubernetes, as JSON that the chart writes.

    {"networkPolicies": {"enabled": true, "operators": [PEER], "clients": [PEER],
                         "monitors": [PEER]},
     "monitors": {"enabled": true, "podMonitor": true, "rules": true, "labels": {…},
                  "runbooks": URL},
     "certificates": {"enabled": true}, "peerTokens": {"enabled": true}, "rdmaResource": "rdma/ib"}

A PEER is {"namespaceLabels": {…}, "podLabels": {…}}: pods that NetworkPolicies let in.
"""

import json
from collections.abc import Mapping
from dataclasses import replace

from pd_operator.fields import FieldError, Node
from pd_operator.podparts import Peer, Settings


class InvalidRendering(Exception):
    """What is wrong with it, a line each."""


def parse(text: str, base: Settings) -> Settings:
    """The settings with what the text says. Raises InvalidRendering."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InvalidRendering(f"is no JSON: {error}") from None
    errors: list[FieldError] = []
    node = Node(document, "", errors)
    policies, monitors = node.child_or_empty("networkPolicies"), node.child_or_empty("monitors")
    certificates = node.child_or_empty("certificates")
    tokens = node.child_or_empty("peerTokens")
    made = replace(
        base,
        network_policies=_switch(policies, "enabled", base.network_policies),
        operators=_peers(policies, "operators"),
        clients=_peers(policies, "clients"),
        monitors_from=_peers(policies, "monitors"),
        monitors=_switch(monitors, "enabled", base.monitors),
        monitor_labels=_labels(monitors, "labels"),
        pod_monitor=_switch(monitors, "podMonitor", base.pod_monitor),
        rules=_switch(monitors, "rules", base.rules),
        runbooks=_text(monitors, "runbooks"),
        certificates=_switch(certificates, "enabled", base.certificates),
        tokens=_switch(tokens, "enabled", base.tokens),
        rdma_resource=_text(node, "rdmaResource") or base.rdma_resource,
    )
    for one in (policies, monitors, certificates, tokens, node):
        one.close()
    if errors:
        raise InvalidRendering("\n".join(str(error) for error in errors))
    return made


def _switch(node: Node, name: str, default: bool) -> bool:
    value = node.raw(name) if node.has(name) else default
    if not isinstance(value, bool):
        node.error(name, f"is {value!r}", "write true or false")
        return default
    return value


def _text(node: Node, name: str) -> str:
    value = node.raw(name) if node.has(name) else ""
    if not isinstance(value, str):
        node.error(name, f"is {value!r}", "write text")
        return ""
    return value


def _labels(node: Node, name: str) -> Mapping[str, str]:
    return node.texts(name)


def _peers(node: Node, name: str) -> tuple[Peer, ...]:
    found = []
    for item in node.children(name):
        found.append(Peer(_labels(item, "namespaceLabels"), _labels(item, "podLabels")))
        item.close()
    return tuple(found)
