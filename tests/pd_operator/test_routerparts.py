"""Covers pd_operator.routerparts: routing and admission as flags, which the router reads."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_operator import api, desired
from pd_operator.podparts import Settings
from pd_operator.podspec import router_template
from pd_router import routing as router_routing
from pd_router import settings as router_settings
from pd_router.classes import Goals
from tests.pd_operator.objects import SETTINGS, document, rendered

KUBERNETES = Settings(host_paths=False)


def flags(**spec: Any) -> tuple[str, ...]:
    return api.parse(document(**{f"spec.router.{k}": v for k, v in spec.items()})).router.flags


def test_defaults_make_no_flags() -> None:
    assert flags() == ()
    assert flags(routing={"policy": "cost", "sessionKvLimit": 0.8}, admission={}) == ()


def test_operator_router_and_crd_know_the_same_policies() -> None:
    crd = yaml.safe_load(Path("crds/pdcluster.dev_pdclusters.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in ("spec", "router", "routing", "policy"):
        schema = schema["properties"][name]
    assert tuple(schema["enum"]) == router_routing.POLICIES
    for policy in router_routing.POLICIES:
        given = flags(routing={"policy": policy})
        assert given == (() if policy == "cost" else (f"--policy={policy}",))


def test_tracing_is_the_routers() -> None:
    """Spans of what workers did are made by routers: no pool is rolled for it."""
    spec = {"spec.tracing": {"endpoint": "https://otel:4318/x", "sampleRatio": 0.25}}
    traced = api.parse(document(**spec)).router.flags
    assert traced == ("--trace-endpoint=https://otel:4318/x", "--trace-ratio=0.25")
    places = ["--model=m", "--router-name=r", "--http=a:1", "--admin=a:2", "--control=a:3"]
    read = router_settings.parse([*traced, *places])
    assert (read.trace_endpoint, read.trace_ratio) == ("https://otel:4318/x", 0.25)
    before, after = rendered(api.parse(document())), rendered(api.parse(document(**spec)))
    assert before.pools == after.pools


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_collectors_have_ports_that_there_are(port: int) -> None:
    with pytest.raises(api.InvalidCluster, match=f"names port {port}"):
        api.parse(document(**{"spec.tracing": {"endpoint": f"http://otel:{port}"}}))


def test_the_router_reads_what_is_written() -> None:
    written = {
        "processes": 3,
        "routing": {
            "policy": "prefix",
            "disaggregate": "never",
            "copies": "never",
            "sessionKvLimit": 0.5,
        },
        "admission": {
            "classHeader": True,
            "classes": [{"name": "std"}, {"name": "vip", "priority": 9, "ttft": "500ms"}],
            "limits": {"requestsPerMinute": 60, "burst": "5s"},
        },
    }
    cluster = api.parse(document(**{f"spec.router.{k}": v for k, v in written.items()}))
    template = router_template(cluster, SETTINGS)
    [container] = template["spec"]["containers"]
    given = [one for one in container["args"] if "$(" not in one]
    places = ["--router-name=r", "--http=a:1", "--admin=a:2", "--control=a:3"]
    read = router_settings.parse([*given, *places])
    assert (read.routing.policy, read.routing.disaggregate) == ("prefix", "never")
    assert read.routing.session_kv_limit == 0.5
    assert read.routing.pulls is None
    assert read.class_header
    assert read.processes == 3
    vip = read.promises.named("vip")
    assert vip is not None
    assert (vip.priority, vip.ttft_s, vip.tpot_s) == (9, 0.5, None)
    assert read.promises.limit.requests_per_minute == 60
    assert read.promises.limit.burst_s == 5


@pytest.mark.parametrize(
    ("written", "after_s", "share"),
    [
        ({}, None, 0.05),
        ({"after": "500ms"}, 0.5, 0.05),
        ({"after": "2s", "budget": 0.1}, 2.0, 0.1),
    ],
)
def test_hedges_are_asked_for(written: dict[str, Any], after_s: float | None, share: float) -> None:
    places = ["--model=m", "--router-name=r", "--http=a:1", "--admin=a:2", "--control=a:3"]
    assert router_settings.parse(places).routing.hedge is None
    read = router_settings.parse([*flags(routing={"hedge": written}), *places])
    assert read.routing.hedge is not None
    assert (read.routing.hedge.after_s, read.routing.hedge.share) == (after_s, share)


@pytest.mark.parametrize(
    ("pools", "hold_s"),
    [
        ({"prefill": 0, "decode": 0}, 90.0),
        ({"prefill": 1, "decode": 0}, 90.0),
        ({"prefill": 0, "decode": 1}, 0.0),  # decode computes prompts itself meanwhile
        ({"prefill": None, "decode": None}, 0.0),  # replicas
    ],
)
def test_requests_wait_for_pools_that_may_go_to_zero(
    pools: dict[str, int | None], hold_s: float
) -> None:
    slo = {"ttft": {"target": "1s"}, "tpot": {"target": "60ms"}}
    changes: dict[str, Any] = {"spec.slo": slo}
    for role, fewest in pools.items():
        scaling = {"mode": "SLO", "minReplicas": fewest, "maxReplicas": 2}
        fields = {"replicas": 1} if fewest is None else {"scaling": scaling}
        changes[f"spec.{role}"] = {"startTimeout": "90s", **fields}
    [container] = router_template(api.parse(document(**changes)), SETTINGS)["spec"]["containers"]
    given = [one for one in container["args"] if "$(" not in one]
    places = ["--router-name=r", "--http=a:1", "--admin=a:2", "--control=a:3"]
    assert router_settings.parse([*given, *places]).hold_s == hold_s


def test_a_promise_between_tokens_is_that_of_the_default_class() -> None:
    def read(**spec: Any) -> router_settings.Settings:
        given = api.parse(document(**{"spec.slo": {"tpot": {"target": "60ms"}}, **spec}))
        places = ["--model=m", "--router-name=r", "--http=a:1", "--admin=a:2", "--control=a:3"]
        return router_settings.parse([*given.router.flags, *places])

    [default] = read().promises.classes
    assert (default.name, default.tpot_s, default.ttft_s) == ("default", 0.06, None)
    assert read().promises.goals("default") == Goals(None, 0.06)
    [own] = read(**{"spec.router.admission": {"classes": [{"name": "std"}]}}).promises.classes
    assert (own.name, own.tpot_s) == ("std", None)


def test_what_the_cluster_promises_is_what_answers_are_measured_by_and_refuses_nobody() -> None:
    slo = {"ttft": {"target": "2s"}, "tpot": {"target": "60ms"}}
    classes = [{"name": "std"}, {"name": "vip", "ttft": "500ms"}]
    spec = {"spec.slo": slo, "spec.router.admission": {"classes": classes}}
    places = ["--model=m", "--router-name=r", "--http=a:1", "--admin=a:2", "--control=a:3"]
    promises = router_settings.parse([*api.parse(document(**spec)).router.flags, *places]).promises
    assert promises.goals("std") == Goals(2.0, 0.06)
    assert promises.goals("vip") == Goals(0.5, 0.06)
    assert [one.ttft_s for one in promises.classes] == [None, 0.5]
    alone = api.parse(document(**{"spec.slo": {"ttft": slo["ttft"]}})).router.flags
    [only] = router_settings.parse([*alone, *places]).promises.classes
    assert (only.name, only.ttft_s) == ("default", None)


def test_api_keys_come_from_a_mounted_secret() -> None:
    keys = {
        "secret": "chat-keys",
        "clients": [
            {"name": "team-a", "class": "vip", "limits": {"requestsPerMinute": 30}, "weight": 2},
            {"name": "Team_b.key"},
        ],
    }
    cluster = api.parse(
        document(
            **{
                "spec.security.apiKeys": keys,
                "spec.router.admission": {"classes": [{"name": "std"}, {"name": "vip"}]},
            }
        )
    )
    template = router_template(cluster, SETTINGS)
    [container] = template["spec"]["containers"]
    [mount] = [one for one in container["volumeMounts"] if one["name"] == "api-keys"]
    [volume] = [one for one in template["spec"]["volumes"] if one["name"] == "api-keys"]
    given = [one for one in container["args"] if "$(" not in one]
    read = router_settings.parse(
        [*given, "--router-name=r", "--http=a:1", "--admin=a:2", "--control=a:3"]
    )
    assert mount == {"name": "api-keys", "mountPath": str(read.api_keys), "readOnly": True}
    assert volume["secret"] == {"secretName": "chat-keys", "optional": True}
    client = read.promises.clients["team-a"]
    assert (client.sla, client.weight) == ("vip", 2)
    assert read.promises.weight_of("Team_b.key") == 1
    assert read.promises.limit_of("team-a").requests_per_minute == 30
    assert read.promises.clients["Team_b.key"].sla is None
    assert "subPath" not in mount  # it would never change


def test_workers_do_not_roll_for_keys() -> None:
    plain, keyed = document(), document(**{"spec.security.apiKeys": {"secret": "chat-keys"}})
    before, after = (
        [pool.revision for pool in rendered(api.parse(one), KUBERNETES).pools]
        for one in (plain, keyed)
    )
    assert before == after


def test_on_one_machine_there_are_no_secrets() -> None:
    cluster = api.parse(document(**{"spec.security.apiKeys": {"secret": "chat-keys"}}))
    desired.check_supported(cluster, KUBERNETES)
    with pytest.raises(api.InvalidCluster, match=r"spec\.security\.apiKeys: names a Secret"):
        desired.check_supported(cluster, SETTINGS)


def test_the_live_page_is_there_unless_switched_off() -> None:
    assert flags(livePage=True) == ()
    assert flags(livePage=False) == ("--no-live-page",)
    places = ["--router-name=r", "--http=a:1", "--admin=a:2", "--control=a:3", "--model=m"]
    assert router_settings.parse(places).live_page
    assert not router_settings.parse([*places, *flags(livePage=False)]).live_page
    [container] = router_template(api.parse(document()), Settings(live_page=False))["spec"][
        "containers"
    ]
    assert "--no-live-page" in container["args"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"routing": {"policy": "best"}}, "spec.router.routing.policy"),
        ({"routing": {"polcy": "cost"}}, "did you mean policy"),
        ({"admission": {"classes": [{}]}}, "spec.router.admission.classes[0].name"),
        (
            {"admission": {"classes": [{"name": "a", "share": 0.7}, {"name": "b", "share": 0.7}]}},
            "more than 1 together",
        ),
        ({"admission": {"classes": [{"name": "a"}, {"name": "a"}]}}, "a name twice"),
        ({"admission": {"limits": {"requestsPerMinute": 0}}}, "requestsPerMinute"),
    ],
)
def test_what_is_wrong_is_told(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(api.InvalidCluster) as caught:
        flags(**spec)
    assert says in str(caught.value)
