"""Traces in both formats, what isn't one, and models of engines."""

from pathlib import Path

import pytest

from pd_core.gpus import GPUS
from pd_core.known_models import KNOWN_MODELS
from pd_sim import perf, trace

DATA = Path(__file__).parent / "data"


def test_azure() -> None:
    with (DATA / "azure_excerpt.csv").open() as lines:
        found = trace.read(lines)
    assert len(found.requests) == 200
    assert found.requests[0] == trace.Request(0.0, 374, 44)
    assert found.requests[1].at_s == pytest.approx(4.314579, abs=1e-6)


def test_mooncake_tells_prefixes() -> None:
    with (DATA / "mooncake_excerpt.jsonl").open() as lines:
        found = trace.read(lines)
    assert len(found.requests) == 60
    first, second = found.requests[:2]
    assert len(first.blocks) == -(-first.prompt_tokens // found.block_tokens)
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: neither"),
        ("hello\n", "line 1: neither"),
        ("TIMESTAMP,Context\n", "line 1: columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,x,1\n", "line 2"),
        ('{"timestamp": 0}\n', "line 1"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n[]\n', "line 2"),
    ],
)
def test_what_is_no_trace(text: str, says: str) -> None:
    with pytest.raises(trace.BadTrace, match=says):
        trace.read(text.splitlines(keepends=True))


def test_faster_is_so_many_times_the_load() -> None:
    with (DATA / "mooncake_excerpt.jsonl").open() as lines:
        found = trace.faster(trace.read(lines), 3)
    assert len(found.requests) == 180
    assert [r.at_s for r in found.requests] == sorted(r.at_s for r in found.requests)
    assert len({block for r in found.requests for block in r.blocks[:1]}) >= 3


def test_a_roofline_goes_through_what_was_measured() -> None:
    steps = {1: 0.030, 16: 0.033, 64: 0.050}
    prompts = {128: 0.05, 1024: 0.105, 2048: 0.2, 8192: 0.9}
    made = perf.fit(KNOWN_MODELS["llama-2-70b"], GPUS["h100"], 4, perf.Measured(prompts, steps))
    for tokens, seconds in prompts.items():
        assert made.prompt_s(tokens) == pytest.approx(seconds, rel=0.15)
    for batch, seconds in steps.items():
        assert made.step_s(batch, batch * 576) == pytest.approx(seconds, rel=0.01)
    assert made.step_s(128, 128 * 576) == pytest.approx(0.050 + 64 * 0.017 / 48, rel=0.02)
    assert made.most_within(0.050, 576) in (63, 64)


def test_attention_grows_with_the_square() -> None:
    made = perf.from_data_sheet(KNOWN_MODELS["llama-3-8b"], GPUS["h100"], 1)
    assert made.prompt_s(128_000) > 2 * made.prompt_s(64_000)
    assert made.prompt_s(64_000, chunk_tokens=512) >= made.prompt_s(64_000)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for KV"):
        perf.from_data_sheet(KNOWN_MODELS["llama-2-70b"], GPUS["l4"], 1)
