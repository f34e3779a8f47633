"""PURE. Reads how routers choose workers and what they promise, as their flags.

What is left at its default makes no flag: an older router knows fewer of them.
"""

import json
import re
from dataclasses import replace
from typing import Any

from pd_core.policies import POLICIES
from pd_operator.apitypes import Router, Slo
from pd_operator.fields import NAME_PATTERN, OBJECT_PATTERN, Node

_ENTRY = re.compile(r"[-._a-zA-Z0-9]+")
_ANY_CLASS = re.compile(r".+")
_COLLECTOR = re.compile(
    r"(?P<scheme>https?)://[-.a-zA-Z0-9]+(:(?P<port>[0-9]{1,5}))?(/[-._~a-zA-Z0-9/]*)?"
)
NO_LIVE_PAGE = "--no-live-page"
_MOST_PER_MINUTE = 1e9
_LONGEST_GOAL_S = 600.0
_MOST_WEIGHT = 1000


Clients = dict[str, dict[str, Any]]


def api_keys(node: Node) -> tuple[str, Clients]:
    """`spec.security.apiKeys`: the Secret, and what clients have of their own."""
    node.required("secret", "the name of a Secret, such as secret: chat-keys")
    secret = node.text("secret", OBJECT_PATTERN, "the name of a Secret")
    clients: Clients = {}
    for one in node.children("clients"):
        one.required("name", "an entry of the Secret, such as name: team-a")
        name = one.text("name", _ENTRY, "the name of an entry of the Secret")
        if name in clients:
            one.error("name", "is there twice", "write another name")
        clients[name] = {}
        if one.has("class"):
            clients[name]["class"] = one.text("class", _ANY_CLASS, "a class's name", 63)
        if one.has("limits"):
            clients[name]["limits"] = _limits(one.child_or_empty("limits"))
        weight = one.number("weight", 1.0, 0, _MOST_WEIGHT)
        if weight != 1:
            clients[name]["weight"] = weight
        one.close()
    node.close()
    return secret, clients


def flags(router: Node, slo: Slo, clients: Clients, keys: Node | None) -> tuple[str, ...]:
    """The flags of all that `spec.router` says beyond its pods, of the clients that `keys`
    names, and of what `slo` promises."""
    page = router.flag("livePage", True)
    chosen = _routing(router.child_or_empty("routing"))
    return (*chosen, *_admission(router, slo, clients, keys), *(() if page else (NO_LIVE_PAGE,)))


def traced(router: Router, node: Node | None) -> Router:
    """The router, sending its requests' spans where `spec.tracing` says."""
    if node is None:
        return router
    node.required("endpoint", "the address of a collector, such as endpoint: http://otel:4318")
    describe = "an address such as http://otel-collector.observability:4318"
    endpoint = node.text("endpoint", _COLLECTOR, describe, 512)
    ratio = node.share("sampleRatio", 1.0)
    node.close()
    found = _COLLECTOR.fullmatch(endpoint)
    if found is None:
        return router
    port = int(found["port"] or (443 if found["scheme"] == "https" else 80))
    if not 0 < port < 65536:
        node.error("endpoint", f"names port {port}", "write one from 1 to 65535")
        return router
    made = [f"--trace-endpoint={endpoint}", *([f"--trace-ratio={ratio:g}"] if ratio < 1 else [])]
    return replace(router, flags=(*router.flags, *made), collector_port=port)


def _routing(node: Node) -> list[str]:
    policy = node.choice("policy", "cost", POLICIES)
    disaggregate = node.choice("disaggregate", "auto", ("auto", "always", "never"))
    copies = node.choice("copies", "auto", ("auto", "never"))
    limit = node.number("sessionKvLimit", 0.8, 0, 1)
    trace = node.flag("trace", False)
    hedge = node.child("hedge")
    hedged = [] if hedge is None else _hedge(hedge)
    node.close()
    made = [
        *([f"--policy={policy}"] if policy != "cost" else []),
        *([f"--disaggregate={disaggregate}"] if disaggregate != "auto" else []),
        *([f"--copies={copies}"] if copies != "auto" else []),
        *([f"--session-kv-limit={limit:g}"] if limit != 0.8 else []),
        *hedged,
    ]
    return [*made, *(["--allow-trace"] if trace else [])]


def _hedge(node: Node) -> list[str]:
    after_s = node.duration("after", 0.0, 0.01, _LONGEST_GOAL_S)
    share = node.number("budget", 0.05, 0, 0.5)
    node.close()
    made = f"--hedge={after_s:g}" if after_s else "--hedge=auto"
    return [made, *([f"--hedge-share={share:g}"] if share != 0.05 else [])]


def _admission(router: Node, slo: Slo, clients: Clients, keys: Node | None) -> list[str]:
    node = router.child_or_empty("admission")
    classes = [_class(one) for one in node.children("classes")]
    if sum(one.get("share", 0.0) for one in classes) > 1:
        node.error("classes", "have shares of more than 1 together", "write smaller ones")
    names = [one["name"] for one in classes]
    if len(set(names)) < len(names):
        node.error("classes", "have a name twice", "write another name")
    limits = _limits(node.child_or_empty("limits"))
    header = node.flag("classHeader", False)
    node.close()
    if keys is not None and {c["class"] for c in clients.values() if "class" in c} - {*names}:
        problem = "name a class that spec.router.admission.classes hasn't got"
        keys.error("clients", problem, "add it there, or write another")
    made = []
    if not classes and slo.tpot is not None:
        # Workers cut prompts for it. Its TTFT is no reason to refuse anybody: classes are.
        classes = [{"name": "default", "tpot": slo.tpot.target_s}]
    # What answers are measured by where their class promises nothing.
    promised = (("ttft", slo.ttft), ("tpot", slo.tpot))
    goals = {name: target.target_s for name, target in promised if target is not None}
    if classes or limits or clients or goals:
        document: dict[str, Any] = {"classes": classes, "limits": limits}
        document |= {"slo": goals} if goals else {}
        document |= {"clients": clients} if clients else {}
        made.append(f"--admission={json.dumps(document, sort_keys=True, separators=(',', ':'))}")
    return [*made, *(["--class-header"] if header else [])]


def _class(node: Node) -> dict[str, Any]:
    node.required("name", "a name, such as name: interactive")
    found: dict[str, Any] = {
        "name": node.text("name", NAME_PATTERN, "lower-case letters, digits and dashes", 63),
        "priority": node.integer("priority", 0, -1000, 1000),
    }
    for goal in ("ttft", "tpot"):
        seconds = node.duration(goal, 0.0, 0.001, _LONGEST_GOAL_S)
        if seconds:
            found[goal] = seconds
    if node.has("share"):
        found["share"] = node.number("share", 0.0, 0, 1)
    node.close()
    return found


def _limits(node: Node) -> dict[str, float]:
    found = {}
    for name in ("requestsPerMinute", "tokensPerMinute"):
        if rate := node.number(name, 0.0, 0, _MOST_PER_MINUTE):
            found[name] = rate
    burst_s = node.duration("burst", 60.0, 1.0, 3600.0)
    node.close()
    return found | {"burstSeconds": burst_s} if found else {}
