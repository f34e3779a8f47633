"""What the dashboards show: titles, words and queries. `scripts/dashboards.py` draws them.

`OF` in a query stands for the PDCluster that was chosen at the top.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

OF = 'namespace="$namespace",pdcluster_dev_cluster="$cluster"'
# As the operator tells of a PDCluster.
_TOLD = 'pdcluster_namespace="$namespace",pdcluster="$cluster"'
_RECORDED = 'namespace="$namespace",pdcluster="$cluster"'
_RATE = "$__rate_interval"
_KNOWN = 'class!=""'
_OURS = 'status=~"200|429|5.."'
Kind = Literal["lines", "stacked", "number"]


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is Grafana's name of one; `text` says how to read it."""

    title: str
    unit: str
    text: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """`of_cluster`: it has variables to choose a PDCluster by."""

    name: str
    title: str
    text: str
    rows: tuple[Row, ...]
    of_cluster: bool = True

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels


def _panel(
    title: str, unit: str, text: str, *queries: tuple[str, str], kind: Kind = "lines"
) -> Panel:
    return Panel(title, unit, text, tuple(Query(*one) for one in queries), kind)


def _quantiles(name: str, by: str = "", *shares: float) -> list[tuple[str, str]]:
    found = []
    for share in shares or (0.5, 0.99):
        more = f", {by}" if by else ""
        rate = f"sum by (le{more}) (rate({name}_bucket{{{OF}}}[{_RATE}]))"
        label = f"{{{{{by}}}}} " if by else ""
        found.append((f"histogram_quantile({share}, {rate})", f"{label}p{share * 100:g}"))
    return found


def _rate(name: str, by: str = "", labels: str = "") -> str:
    more = f",{labels}" if labels else ""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({name}{{{OF}{more}}}[{_RATE}]))"


def _attained(metric: str) -> str:
    return f"1 - pdcluster:{metric}_late:ratio_rate1h{{{_RECORDED}}}"


def _burn(metric: str) -> str:
    late = f"pdcluster:{metric}_late:ratio_rate1h{{{_RECORDED}}}"
    objective = f'pdcluster:slo:objective{{{_RECORDED},slo="{metric}"}}'
    return f"{late} / on (namespace, pdcluster) (1 - {objective})"


def _of_class(metric: str, labels: str) -> str:
    return _rate(f"pdcluster_router_{metric}_total", "class", labels)


_R, _E, _O = "pdcluster_router", "pdcluster_engine", "pdcluster_operator"


def _pool_replicas(states: str) -> str:
    own = f'{_TOLD},state=~"{states}"'
    return f"max by (role, state) ({_O}_pool_replicas{{{own}}})"


def _decisions(decision: str) -> str:
    own = f'{_TOLD},decision="{decision}"'
    return f"sum by (role, reason) (increase({_O}_scaling_decisions_total{{{own}}}[5m]))"


USERS = Board(
    "users",
    "PDCluster: what users get",
    "Promises, latencies, answers and failures of one PDCluster.",
    (
        Row("Promises", (
            _panel("TTFT within its target", "percentunit",
                   "Share of the last hour's requests whose first token came in time. Needs "
                   "spec.slo.ttft and the rules that the operator writes.",
                   (_attained("ttft"), "within target"), kind="number"),
            _panel("TPOT within its target", "percentunit",
                   "Share of the last hour's requests whose time per token was in time. Needs "
                   "spec.slo.tpot.",
                   (_attained("tpot"), "within target"), kind="number"),
            _panel("How fast the budget goes", "none",
                   "1: exactly as many requests are late as the promise allows. Above 14.4 for an "
                   "hour somebody is woken.",
                   (_burn("ttft"), "TTFT"), (_burn("tpot"), "TPOT"),
                   (f'pdcluster:slo:target_seconds{{{_RECORDED},slo="ttft"}}', "TTFT target (s)")),
        )),
        Row("By class of service", (
            _panel("Answers within their promises", "percentunit",
                   "Of all requests that weren't the client's mistake: those whose answer met the "
                   "TTFT and TPOT of its class (router.admission.classes), else of spec.slo. "
                   "Refused and failed ones missed it.",
                   (f"{_of_class('goodput_requests', _KNOWN)} / "
                    f"{_of_class('requests', f'{_KNOWN},{_OURS}')}", "{{class}}")),
            _panel("Goodput", "reqps", "Requests a second that met their promises.",
                   (_of_class("goodput_requests", _KNOWN), "{{class}}"), kind="stacked"),
            _panel("Requests", "reqps",
                   "By class. Without one: those that ended before it was known, such as by a "
                   "wrong API key.",
                   (_of_class("requests", ""), "{{class}}"), kind="stacked"),
            _panel("Time to the first token, by class", "s", "",
                   *_quantiles(f"{_R}_ttft_seconds", "class", 0.5, 0.99)),
            _panel("Time per token, by class", "s", "",
                   *_quantiles(f"{_R}_tpot_seconds", "class", 0.5, 0.99)),
            _panel("Wait in the router, by class", "s", "",
                   *_quantiles(f"{_R}_queue_seconds", "class", 0.99)),
        )),
        Row("Latency", (
            _panel("Time to the first token", "s", "From the request to its first text.",
                   *_quantiles(f"{_R}_ttft_seconds", "", 0.5, 0.9, 0.99)),
            _panel("Time per token", "s", "Mean of an answer's tokens after the first.",
                   *_quantiles(f"{_R}_tpot_seconds", "", 0.5, 0.9, 0.99)),
            _panel("Time between two tokens", "s", "Each gap by itself: pauses show here first.",
                   *_quantiles(f"{_R}_itl_seconds", "", 0.5, 0.99)),
            _panel("Whole requests", "s", "From the request to its last byte.",
                   *_quantiles(f"{_R}_request_seconds", "", 0.5, 0.99)),
            _panel("Wait in the router", "s", "In admission, before any worker.",
                   *_quantiles(f"{_R}_queue_seconds", "", 0.5, 0.99)),
        )),
        Row("Traffic", (
            _panel("Answers", "reqps", "By HTTP status.",
                   (_rate(f"{_R}_requests_total", "status"), "{{status}}"), kind="stacked"),
            _panel("Failures", "reqps", "By kind; clients that went away are among them.",
                   (_rate(f"{_R}_failures_total", "kind"), "{{kind}}"), kind="stacked"),
            _panel("Requests without a right API key", "reqps", "",
                   (_rate(f"{_R}_unauthorized_total"), "refused")),
            _panel("Tokens", "short", "A second: prompts in, of them cached ones, answers out.",
                   (_rate(f"{_R}_prompt_tokens_total"), "prompt"),
                   (_rate(f"{_R}_cached_tokens_total"), "prompt, cached"),
                   (_rate(f"{_R}_completion_tokens_total"), "answer")),
            _panel("Spans of traces", "ops",
                   "Where spec.tracing is. Lost: the collector didn't take them within a while, or "
                   "too many waited for it; the router's log says why.",
                   (_rate(f"{_R}_trace_spans_total", "result"), "{{result}}")),
            _panel("Requests now", "short", "In the routers; held: before there is any worker.",
                   (f"sum({_R}_running_requests{{{OF}}})", "running"),
                   (f"sum({_R}_held_requests{{{OF}}})", "held")),
        )),
    ),
)  # fmt: skip

POOLS = Board(
    "pools",
    "PDCluster: pools",
    "Workers of one PDCluster: how many, how busy, where KV is, how hand-overs go.",
    (
        Row("Pools", (
            _panel("Workers", "short", "Those that are scraped, by role.",
                   (f"count by (pool) ({_E}_running_sequences{{{OF}}})", "{{pool}}")),
            _panel("A usable pair is there", "bool_yes_no", "As each router sees it.",
                   (f"min({_R}_ready{{{OF}}})", "ready"), kind="number"),
            _panel("Wanted and ready", "short", "As the operator has it.",
                   (_pool_replicas("desired|ready"), "{{role}} {{state}}")),
            _panel("On their way out", "short",
                   "Workers that drain, and those of an older revision that still are there: a "
                   "rollout is over when there are none.",
                   (_pool_replicas("draining|outdated"), "{{role}} {{state}}")),
            _panel("Why sizes changed", "short",
                   "In five minutes. Events of the PDCluster, the live page and kubectl pd explain "
                   "have the numbers.",
                   (_decisions("scale"), "{{role}} {{reason}}"), kind="stacked"),
            _panel("Why they stay as they are", "short", "Looks of the operator in five minutes.",
                   (_decisions("hold"), "{{role}} {{reason}}"), kind="stacked"),
            _panel("Rollouts and repairs", "short", "What the operator wrote in five minutes.",
                   ("sum by (operation, kind) "
                    f"(increase({_O}_operations_total{{{_TOLD}}}[5m]))",
                    "{{operation}} {{kind}}"), kind="stacked"),
        )),
        Row("Load", (
            _panel("Sequences in decode", "short", "The batch of each worker.",
                   (f"{_E}_running_sequences{{{OF}}}", "{{worker}}")),
            _panel("Requests that wait for a step", "short", "",
                   (f"{_E}_queued_requests{{{OF}}}", "{{worker}}")),
            _panel("Prompt tokens still to compute", "short", "",
                   (f"{_E}_pending_tokens{{{OF}}}", "{{worker}}")),
            _panel("Steps", "s", "How long a step of the model takes.",
                   *_quantiles(f"{_E}_step_seconds", "pool", 0.5, 0.99)),
            _panel("Tokens a second", "short", "Computed in steps, and drawn.",
                   (_rate(f"{_E}_step_tokens_total", "pool"), "{{pool}} computed"),
                   (_rate(f"{_E}_generated_tokens_total", "pool"), "{{pool}} drawn")),
            _panel("Speculation", "short",
                   "Tokens a second that were computed on a guess, and of them right ones.",
                   (_rate(f"{_E}_draft_tokens_total", "pool"), "{{pool}} guessed"),
                   (_rate(f"{_E}_accepted_draft_tokens_total", "pool"), "{{pool}} right")),
            _panel("Prompts a second", "reqps", "",
                   (_rate(f"{_E}_prompts_total", "pool"), "{{pool}}")),
        )),
        Row("Prefill", (
            _panel("Computing prompts", "s", "As routers see it, and workers.",
                   *_quantiles(f"{_R}_prefill_seconds", "", 0.5, 0.99),
                   *((expr, f"worker {label}")
                     for expr, label in _quantiles(f"{_E}_prefill_seconds", "", 0.99))),
            _panel("Waiting for the first step", "s", "As routers see it, and workers.",
                   *_quantiles(f"{_R}_prefill_queue_seconds", "", 0.5, 0.99),
                   *((expr, f"worker {label}")
                     for expr, label in _quantiles(f"{_E}_queue_seconds", "", 0.99))),
            _panel("Prompt tokens that a cached prefix spared", "percentunit", "",
                   (f"{_rate(f'{_E}_cached_tokens_total')} / {_rate(f'{_R}_prompt_tokens_total')}",
                    "cached")),
        )),
        Row("KV", (
            _panel("KV blocks by state", "short", "",
                   (f"sum by (pool, state) ({_E}_kv_blocks{{{OF}}})", "{{pool}} {{state}}"),
                   kind="stacked"),
            _panel("KV in use", "percentunit", "What no new request can have, of each worker.",
                   (f'sum by (worker) ({_E}_kv_blocks{{{OF},state=~"active|granted|quarantined"}})'
                    f" / sum by (worker) ({_E}_kv_blocks{{{OF}}})", "{{worker}}")),
            _panel("KV kept beyond the pool", "short", "Blocks, where spec says retention.",
                   (f"sum by (pool, store) ({_E}_kv_kept_blocks{{{OF}}})", "{{pool}} {{store}}"),
                   kind="stacked"),
            _panel("KV that came back", "short",
                   "Tokens a second; and prompts a second that were computed, since that is "
                   "faster.",
                   (_rate(f"{_E}_kv_restored_tokens_total", "pool, store"), "{{pool}} {{store}}"),
                   (_rate(f"{_E}_kv_restores_declined_total", "pool, store"),
                    "{{pool}} {{store}}, computed")),
            _panel("Reading it back", "s", "",
                   *_quantiles(f"{_E}_kv_restore_seconds", "", 0.5, 0.99)),
            _panel("Prefixes copied from other workers", "short",
                   "Tokens a second, where that is sooner than computing them; and copies a "
                   "second that failed or were late, so that they were computed after all.",
                   (_rate(f"{_R}_pulled_tokens_total", ""), "tokens"),
                   (_rate(f"{_R}_pulls_total", "outcome"), "copies, {{outcome}}"),
                   (_rate(f"{_E}_kv_copied_tokens_total", "pool, direction, outcome"),
                    "{{pool}} {{direction}} {{outcome}}")),
            _panel("Copying them", "s", "Until the copy was there, or given up.",
                   *_quantiles(f"{_R}_pull_seconds", "", 0.5, 0.99)),
            _panel("Requests that wait for room", "short", "On decode workers.",
                   (f"{_E}_waiting_grants{{{OF}}}", "{{worker}}")),
            _panel("Waiting for room", "s", "As routers see it, and workers.",
                   *_quantiles(f"{_R}_grant_wait_seconds", "", 0.5, 0.99),
                   *((expr, f"worker {label}")
                     for expr, label in _quantiles(f"{_E}_grant_wait_seconds", "", 0.99))),
        )),
        Row("Hand-over", (
            _panel("Hand-overs", "s", "First frame to seal, as routers see it, and decode workers.",
                   *_quantiles(f"{_R}_transfer_seconds", "", 0.5, 0.99),
                   *((expr, f"worker {label}")
                     for expr, label in _quantiles(f"{_E}_kv_transfer_seconds", "", 0.99))),
            _panel("Of it what users see", "s", "From the first token to all KV at decode.",
                   *_quantiles(f"{_R}_transfer_exposed_seconds", "", 0.5, 0.99)),
            _panel("KV moved", "Bps", "",
                   (_rate(f"{_R}_kv_bytes_total", "transport"), "{{transport}}"),
                   (_rate(f"{_E}_kv_bytes_total", "direction"), "workers, {{direction}}")),
            _panel("Hand-overs by outcome", "reqps", "",
                   (_rate(f"{_E}_exports_total", "outcome"), "{{outcome}}")),
        )),
        Row("Trouble", (
            _panel("Requests that began again elsewhere", "reqps", "By why.",
                   (_rate(f"{_R}_retries_total", "kind"), "{{kind}}"), kind="stacked"),
            _panel("Workers that ended unasked", "short", "In ten minutes, as the routers saw it.",
                   (f"max by (pool) (increase({_R}_workers_lost_total{{{OF}}}[10m]))", "{{pool}}")),
            _panel("Prompts computed twice at once", "reqps",
                   "Won: the second prefill worker was first (router.routing.hedge).",
                   (_rate(f"{_R}_hedges_total", "outcome"), "{{outcome}}"), kind="stacked"),
            _panel("Failures at workers", "reqps", "By kind.",
                   (_rate(f"{_E}_failures_total", "pool, kind"), "{{pool}} {{kind}}"),
                   kind="stacked"),
            _panel("Stores of kept KV that failed", "short", "Writes and reads a second.",
                   (_rate(f"{_E}_kv_store_failures_total", "worker, store"),
                    "{{worker}} {{store}}")),
        )),
    ),
)  # fmt: skip

OPERATOR = Board(
    "operator",
    "PDCluster: the operator",
    "The operator itself: whether it acts, how long looks take, what it asks the API server.",
    (
        Row("At work", (
            _panel("One acts", "bool_yes_no", "Whether an operator holds the lease.",
                   (f"sum({_O}_lease_held)", "acts"), kind="number"),
            _panel("Ready", "bool_yes_no", "Whether all of them hear of everything in time.",
                   (f"min({_O}_ready)", "ready"), kind="number"),
            _panel("PDClusters", "short", "", (f"max({_O}_clusters)", "there"), kind="number"),
            _panel("Objects in memory", "short", "", (f"max({_O}_objects)", "objects")),
            _panel("PDClusters that wait for a look", "short", "",
                   (f"sum({_O}_queue_depth)", "waiting")),
        )),
        Row("Looks", (
            _panel("How long a look takes", "s", "",
                   *((f"histogram_quantile({share}, sum by (le) "
                      f"(rate({_O}_reconcile_seconds_bucket[{_RATE}])))", f"p{share * 100:g}")
                     for share in (0.5, 0.99))),
            _panel("Looks by result", "ops", "",
                   (f"sum by (result) (rate({_O}_reconcile_seconds_count[{_RATE}]))",
                    "{{result}}"), kind="stacked"),
            _panel("What was written", "short", "In five minutes.",
                   (f"sum by (operation, kind) (increase({_O}_operations_total[5m]))",
                    "{{operation}} {{kind}}"), kind="stacked"),
            _panel("What was decided on sizes", "short", "In five minutes.",
                   (f"sum by (role, decision, reason) (increase({_O}_scaling_decisions_total[5m]))",
                    "{{role}} {{decision}} {{reason}}"), kind="stacked"),
        )),
        Row("The API server", (
            _panel("Calls", "ops", "Code 0: no answer.",
                   (f"sum by (verb, code) (rate({_O}_api_calls_total[{_RATE}]))",
                    "{{verb}} {{code}}"), kind="stacked"),
            _panel("How long calls take", "s", "",
                   (f"histogram_quantile(0.99, sum by (le, verb) "
                    f"(rate({_O}_api_call_seconds_bucket[{_RATE}])))", "{{verb}} p99")),
            _panel("Watches that broke", "short", "In five minutes.",
                   (f"sum by (kind, reason) (increase({_O}_watch_restarts_total[5m]))",
                    "{{kind}} {{reason}}"), kind="stacked"),
        )),
    ),
    of_cluster=False,
)  # fmt: skip

BOARDS = (USERS, POOLS, OPERATOR)
