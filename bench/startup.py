"""How long `pdcluster up` takes until it is ready, and until it has answered, with the
environment installed: the median of several starts, and the first start ever (which
converts the model) alone.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from bench.common import ROOT, Goal, arguments, median, report, table
from tests.client import stream
from tests.cluster import serving

GOALS = {"ready_s": Goal("<=", 20)}
_RUNS = 5


def start_once(cache: Path) -> tuple[float, float]:
    """(seconds to `ready:`, seconds to the end of a first answer)."""
    env = {"XDG_CACHE_HOME": str(cache)}
    example = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    with tempfile.TemporaryDirectory() as work:
        started = time.perf_counter()
        with serving(example, Path(work), env) as cluster:
            ready = time.perf_counter() - started
            body: dict[str, Any] = {
                "model": example["spec"]["model"]["name"],
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "max_tokens": 16,
                "temperature": 0,
            }
            answer = asyncio.run(stream("127.0.0.1", cluster.port, "/v1/chat/completions", body))
            answered = time.perf_counter() - started
            if not answer.done or not answer.text:
                raise RuntimeError(f"no answer: {answer}")
    return ready, answered


def main(quick: bool) -> None:
    with tempfile.TemporaryDirectory() as cache:
        first = start_once(Path(cache))
        later = [start_once(Path(cache)) for _ in range(1 if quick else _RUNS)]
    rows = [("first ever", *first), *((f"start {i}", *run) for i, run in enumerate(later, 1))]
    print(table(("start", "ready s", "answered s"), rows))
    metrics = {
        "ready_s": median(ready for ready, _ in later),
        "first_answer_s": median(answered for _, answered in later),
        "first_ever_ready_s": first[0],
    }
    report("startup", metrics, GOALS, quick)


if __name__ == "__main__":
    main(arguments(__doc__))
