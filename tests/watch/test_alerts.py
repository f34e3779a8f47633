"""All rules by promtool: they are valid, each alert fires on what it is about and no other does
with it, and nothing fires on a cluster that is idle, well, or not there.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_operator import alerts
from tests.pd_operator.objects import cluster
from tests.watch.conftest import promtool
from tests.watched import PROMISES

OF = 'namespace="default",pdcluster_dev_cluster="chat"'
TTFT, TPOT = "pdcluster_router_ttft_seconds", "pdcluster_router_tpot_seconds"
PREFILL = 'pdcluster_namespace="default",pdcluster="chat",role="prefill"'
HOURS = 60  # minutes
Series = dict[str, str]


@dataclass
class Story:
    """What is scraped each minute, in promtool's words, and which alerts fire at the end."""

    series: Series
    minutes: int
    firing: set[str] = field(default_factory=set)
    about: Series = field(default_factory=dict)  # labels that come of the series
    together: bool = False  # prefill and decode are one pool


def grows(start: int, a_minute: float, minutes: int) -> str:
    return f"{start}+{a_minute:g}x{minutes}"


def stays(value: float, minutes: int) -> str:
    return f"{value:g}x{minutes}"


def pool(desired: str, ready: str) -> Series:
    """A prefill pool, as the operator counts it."""
    name = "pdcluster_operator_pool_replicas"
    return {
        f'{name}{{{PREFILL},state="desired"}}': desired,
        f'{name}{{{PREFILL},state="ready"}}': ready,
    }


def operator(minutes: int, **changes: str) -> Series:
    """The operator's own series, all well."""
    looks = "pdcluster_operator_reconcile_seconds_count"
    return {
        "pdcluster_operator_lease_held": stays(1, minutes),
        "pdcluster_operator_ready": stays(1, minutes),
        "pdcluster_operator_queue_depth": stays(0, minutes),
        "pdcluster_operator_certificate_age_share": stays(0, minutes),
        **pool(stays(2, minutes), stays(2, minutes)),
        f'{looks}{{result="ok"}}': grows(0, 10, minutes),
    } | changes


def latency(name: str, late: float, a_minute: float, minutes: int) -> Series:
    """Requests of which a share misses every bound below 5 s."""
    early = (1 - late) * a_minute
    bounds = {"0.03": early, "0.05": early, "0.5": early, "5.0": a_minute, "+Inf": a_minute}
    made = {
        f'{name}_bucket{{{OF},le="{bound}"}}': grows(0, count, minutes)
        for bound, count in bounds.items()
    }
    return made | {
        f"{name}_count{{{OF}}}": grows(0, a_minute, minutes),
        f"{name}_sum{{{OF}}}": grows(0, a_minute, minutes),
    }


def served(minutes: int, a_minute: float = 60, late: float = 0.0) -> Series:
    """A cluster that serves, well unless told otherwise."""
    own = {
        f"pdcluster_router_ready{{{OF}}}": stays(1, minutes),
        f"pdcluster_router_held_requests{{{OF}}}": stays(0, minutes),
        f'pdcluster_router_requests_total{{{OF},status="200"}}': grows(0, a_minute, minutes),
        f"pdcluster_router_transfer_exposed_seconds_sum{{{OF}}}": grows(
            0, 0.01 * a_minute, minutes
        ),
        f'pdcluster_engine_kv_blocks{{{OF},pool="decode",state="free"}}': stays(90, minutes),
        f'pdcluster_engine_kv_blocks{{{OF},pool="decode",state="active"}}': stays(10, minutes),
        f'pdcluster_engine_waiting_grants{{{OF},pool="decode"}}': stays(0, minutes),
        lost_at("router-0"): stays(0, minutes),
        lost_at("router-1"): stays(0, minutes),
    }
    both = latency(TTFT, late, a_minute, minutes) | latency(TPOT, 0.0, a_minute, minutes)
    return operator(minutes) | own | both


def lost_at(router: str) -> str:
    return f'pdcluster_router_workers_lost_total{{{OF},pool="prefill",instance="{router}"}}'


def status(code: str) -> str:
    return f'pdcluster_router_requests_total{{{OF},status="{code}"}}'


def kv(state: str) -> str:
    return f'pdcluster_engine_kv_blocks{{{OF},pool="decode",state="{state}"}}'


RETRIES = f'pdcluster_router_retries_total{{{OF},kind="worker_lost"}}'
WAITING = f'pdcluster_engine_waiting_grants{{{OF},pool="decode"}}'
EXPOSED = f"pdcluster_router_transfer_exposed_seconds_sum{{{OF}}}"
READY = f"pdcluster_router_ready{{{OF}}}"
LOOKS = "pdcluster_operator_reconcile_seconds_count"
SHORT = {"pdcluster_namespace": "default", "pdcluster": "chat", "role": "prefill"}

STORIES = {
    "well": Story(served(3 * HOURS), 3 * HOURS),
    "idle": Story(served(3 * HOURS, a_minute=0), 3 * HOURS),
    "not there": Story(operator(3 * HOURS), 3 * HOURS),
    "a few late ones among few": Story(
        served(HOURS, a_minute=0.2, late=1.0), HOURS
    ),
    "within its budget": Story(served(8 * HOURS, late=0.009), 8 * HOURS),
    "no workers": Story(
        served(HOURS) | {READY: stays(0, HOURS)}, HOURS, {"PDClusterNoWorkers"}
    ),
    "no workers for a moment": Story(
        served(20) | {READY: "1x15 0x3 1x10"}, 20
    ),
    "requests fail": Story(
        served(HOURS) | {status("500"): grows(0, 10, HOURS)}, HOURS, {"PDClusterRequestsFail"}
    ),
    "requests are refused": Story(
        served(HOURS) | {status("429"): grows(0, 10, HOURS)}, HOURS, {"PDClusterRequestsRefused"}
    ),
    "requests begin again and again": Story(
        served(HOURS) | {RETRIES: grows(0, 6, HOURS)}, HOURS, {"PDClusterRetriesFrequent"}
    ),
    "a prefill worker is killed again and again": Story(
        served(HOURS) | {one: "0x29 " + grows(0, 0.2, 30)
                         for one in (lost_at("router-0"), lost_at("router-1"))},
        HOURS, {"PDClusterWorkersLost"},
    ),
    "one worker is lost, and two routers say so": Story(
        served(HOURS) | dict.fromkeys((lost_at("router-0"), lost_at("router-1")), "0x44 1x15"),
        HOURS,
    ),
    "TTFT is missed by far": Story(
        served(2 * HOURS, late=0.3), 2 * HOURS,
        {"PDClusterTTFTBurnsFast", "PDClusterTTFTBurnsSlowly"},
    ),
    "TTFT is missed by a little, for long": Story(
        served(8 * HOURS, late=0.035), 8 * HOURS, {"PDClusterTTFTBurnsSlowly"}
    ),
    "TPOT is missed by far": Story(
        served(2 * HOURS) | latency(TPOT, 0.8, 60, 2 * HOURS), 2 * HOURS,
        {"PDClusterTPOTBurnsFast", "PDClusterTPOTBurnsSlowly"},
    ),
    "it was bad and is well again": Story(
        served(5 * HOURS) | latency(TTFT, 0.0, 60, 5 * HOURS) | {
            f'{TTFT}_bucket{{{OF},le="0.5"}}': f"0+20x{HOURS} {20 * HOURS + 60}+60x{4 * HOURS}",
        }, 5 * HOURS, {"PDClusterTTFTBurnsSlowly"},
    ),
    "decode is overloaded": Story(
        served(HOURS) | {kv("free"): stays(2, HOURS), kv("active"): stays(98, HOURS),
                         WAITING: stays(5, HOURS)}, HOURS, {"PDClusterKVFull"}
    ),
    "large requests wait while a fifth is free": Story(
        served(HOURS) | {kv("free"): stays(20, HOURS), kv("active"): stays(80, HOURS),
                         WAITING: stays(1, HOURS)}, HOURS, {"PDClusterKVFull"}
    ),
    "somebody waits now and then": Story(
        served(HOURS) | {WAITING: " ".join(["1x2 0x1"] * (HOURS // 3))}, HOURS
    ),
    "KV is full and nobody waits": Story(
        served(HOURS) | {kv("free"): stays(2, HOURS), kv("active"): stays(98, HOURS)}, HOURS
    ),
    "hand-overs are slow": Story(
        served(HOURS) | {EXPOSED: grows(0, 30, HOURS)}, HOURS, {"PDClusterHandOversSlow"}
    ),
    "together, nothing is handed over": Story(
        served(HOURS) | {EXPOSED: grows(0, 30, HOURS)}, HOURS, together=True
    ),
    "a worker dies again and again": Story(
        # Ready for a minute or two of five, as with CrashLoopBackOff.
        operator(HOURS) | pool(stays(2, HOURS), "2x4 " + "1x2 2x0 1x0 " * 11), HOURS,
        {"PDClusterPoolShort"}, SHORT,
    ),
    "a worker finds no node": Story(
        operator(HOURS) | pool("1x9 2x50", stays(1, HOURS)), HOURS,
        {"PDClusterPoolShort"}, SHORT,
    ),
    "a worker takes its time to start": Story(
        operator(HOURS) | pool("1x9 2x50", "1x22 2x37"), 40
    ),
    "a worker has died once": Story(
        operator(HOURS) | pool(stays(2, HOURS), "2x9 1x4 2x45"), 25
    ),
    "a pool has gone to zero": Story(
        operator(HOURS) | pool("1x9 0x50", "1x9 0x50"), HOURS
    ),
    "the operator is away": Story({}, HOURS, {"PDClusterOperatorAway"}),
    "no operator holds the lease": Story(
        operator(HOURS, pdcluster_operator_lease_held=stays(0, HOURS)), HOURS,
        {"PDClusterOperatorAway"},
    ),
    "the operator isn't ready": Story(
        operator(HOURS, pdcluster_operator_ready=stays(0, HOURS)), HOURS,
        {"PDClusterOperatorUnready"},
    ),
    "the operator is behind": Story(
        operator(HOURS, pdcluster_operator_queue_depth=stays(30, HOURS)), HOURS,
        {"PDClusterOperatorBehind"},
    ),
    "looks fail": Story(
        operator(HOURS) | {f'{LOOKS}{{result="unavailable"}}': grows(0, 5, HOURS)}, HOURS,
        {"PDClusterReconcilesFail"},
    ),
    "a certificate isn't renewed": Story(
        operator(HOURS + 10, pdcluster_operator_certificate_age_share=stays(0.93, HOURS + 10)),
        HOURS + 10, {"PDClusterCertificatesEnd"},
    ),
    "a certificate is renewed when it is due": Story(
        operator(HOURS + 10, pdcluster_operator_certificate_age_share=stays(0.68, HOURS + 10)),
        HOURS + 10,
    ),
    "conflicts are no failures": Story(
        operator(HOURS) | {f'{LOOKS}{{result="conflict"}}': grows(0, 20, HOURS)}, HOURS
    ),
}  # fmt: skip


def groups(*, together: bool = False) -> list[dict[str, Any]]:
    changes: dict[str, Any] = dict(PROMISES)
    if together:
        one = {"spec.prefill": ..., "spec.decode": ..., "spec.colocated": {"replicas": 1}}
        changes |= one
    return [*alerts.groups(cluster(**changes)), *alerts.operator_groups()]


def test_rules_are_valid(tmp_path: Path) -> None:
    idle = {**PROMISES, "spec.prefill.replicas": 0, "spec.decode.replicas": 0}
    for number, found in enumerate((groups(), alerts.groups(cluster(**idle)))):
        file = tmp_path / f"rules-{number}.yaml"
        file.write_text(yaml.safe_dump({"groups": found}))
        assert "SUCCESS" in promtool("check", "rules", "--lint=all", file.name, folder=tmp_path)


@pytest.mark.parametrize("name", STORIES)
def test_the_right_alerts_fire_and_no_other(name: str, tmp_path: Path) -> None:
    story = STORIES[name]
    rules = groups(together=story.together)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rules}))
    known = {rule["alert"]: rule for one in rules for rule in one["rules"] if "alert" in rule}
    assert story.firing <= set(known)
    expected = [
        {
            "eval_time": f"{story.minutes}m",
            "alertname": alert,
            "exp_alerts": [_expected(rule, story.about)] if alert in story.firing else [],
        }
        for alert, rule in known.items()
    ]
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": series, "values": values} for series, values in story.series.items()
                ],
                "alert_rule_test": expected,
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", "test.yaml", folder=tmp_path)


def _expected(rule: dict[str, Any], about: Series) -> dict[str, Any]:
    """As it's sent. `about`: the labels that its expression leaves."""

    def filled(texts: Series) -> Series:
        made = dict(texts)
        for label, value in about.items():
            said = f"{{{{ $labels.{label} }}}}"
            made = {name: text.replace(said, value) for name, text in made.items()}
        return made

    return {
        "exp_labels": filled(rule["labels"]) | about,
        "exp_annotations": filled(rule["annotations"]),
    }


def test_every_alert_has_a_story() -> None:
    named: set[str] = set().union(*(story.firing for story in STORIES.values()))
    known = {rule["alert"] for one in groups() for rule in one["rules"] if "alert" in rule}
    assert named == known
