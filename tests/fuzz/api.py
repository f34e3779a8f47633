"""Schemathesis on the router's own OpenAPI document: `python -m tests.fuzz.api [--seconds 20]`.

A prefill worker, a decode worker and a router run as processes of their own. First whatever the
document allows is asked, and much that it doesn't; then what it allows less what JSON Schema
can't say, and all of that has to be answered. Each answer has to be one that the document
describes, events of streams too, and no status from 500 on is among them. What the document
forbids is refused. Afterwards no process has ended, and no KV block is held.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import Cluster, http_get, serving, spec
from tests.fuzz.corpus import BUILD
from tests.tiny_model import tiny_model_dir

CONTEXT_TOKENS = 256
"""Most requests don't say how long their answer may be: it ends here."""
CHAT_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> answer in <tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}:{{ c.function.arguments }}>"
    "{% endfor %}{% endfor %}"
)
_ACCEPTED = "positive_data_acceptance"
_VOCABULARY = 512
_REQUEST_S = 60
_MOST_S = 2 * 3600.0
_CLOSED = {"type": "object", "additionalProperties": False}
_REQUESTS = "pdcluster_router_requests_total"
_ANY_FIELD = ("response_format", "structured_outputs", "stream_options", "min_tokens", "best_of",
              "tools", "tool_choice", "max_completion_tokens", "top_logprobs")  # fmt: skip
"""Each says something that only another field, or the model, makes right or wrong."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `answers`: how many there were of each status, of generating routes."""

    code: int
    answers: Counter[str]
    output: str


def model(folder: Path) -> Path:
    """The tiny model with a short context, and with a template that takes tools."""
    made = folder / "model"
    shutil.copytree(tiny_model_dir(), made)
    for name, field in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        content = json.loads((made / name).read_text())
        (made / name).write_text(json.dumps(content | {field: CONTEXT_TOKENS}))
    (made / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return made


@contextmanager
def cluster() -> Iterator[Cluster]:
    """One prefill and one decode worker, and a router."""
    pool = {"replicas": 1, "engine": {"threads": 1}}
    router = {"routing": {"disaggregate": "always"}}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        made = spec(model(folder), prefill=pool, decode=pool, router=router)
        with serving(made, folder) as running:
            yield running


def plain(document: dict[str, Any]) -> dict[str, Any]:
    """The document less what JSON Schema can't say: whatever is left has to be answered."""
    narrow = json.loads(json.dumps(document))
    schemas = narrow["components"]["schemas"]
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _VOCABULARY - 1},
           "minItems": 1, "maxItems": 8}  # fmt: skip
    text = {"type": "string", "minLength": 1, "maxLength": 12}
    message = {"role": {"enum": ["system", "developer", "user", "assistant"]}, "content": text}
    schemas["Message"] = {"properties": message, "required": ["role", "content"]} | _CLOSED
    for name in ("ChatRequest", "CompletionRequest"):
        fields = schemas[name]["properties"]
        for field in _ANY_FIELD:
            fields.pop(field, None)
        fields["max_tokens"] = {"type": "integer", "minimum": 0, "maximum": 16}
        fields["n"] = {"type": "integer", "minimum": 1, "maximum": 3}
        fields["stop_token_ids"] = ids
        fields["logit_bias"]["anyOf"][0]["propertyNames"] = {
            "pattern": "^([1-4]?[0-9]|[1-4][0-9]{2})$"
        }
        schemas[name]["required"].append("max_tokens")
    schemas["ChatRequest"]["properties"]["messages"]["maxItems"] = 3
    schemas["CompletionRequest"]["properties"]["prompt"] = {"anyOf": [text, ids]}
    schemas["TokenizeRequest"] = {"properties": {"prompt": text}, "required": ["prompt"]} | _CLOSED
    schemas["DetokenizeRequest"] = {"properties": {"tokens": ids}, "required": ["tokens"]} | _CLOSED
    return dict(narrow)


def run(on: Cluster, *options: str) -> Outcome:
    """Both documents; raises where the processes haven't stayed as they were."""
    before = on.pods()
    url = f"http://127.0.0.1:{on.port}"
    status, text = http_get(f"{url}/openapi.json")
    assert status == 200, text
    BUILD.mkdir(parents=True, exist_ok=True)
    narrow = BUILD / "plain.json"
    narrow.write_text(json.dumps(plain(json.loads(text))))
    phases = ("--phases", "examples,coverage,fuzzing")
    found = _ask(f"{url}/openapi.json", "--exclude-checks", _ACCEPTED, *phases, *options)
    if found.returncode == 0:
        phases = ("--phases", "fuzzing", "--mode", "positive")
        found = _ask(str(narrow), "--url", url, *phases, *options)
    assert on.pods() == before, "processes ended, or others began"
    on.until_settled()
    return Outcome(found.returncode, _answers(on), found.stdout)


def _ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", *arguments),
        *("--request-timeout", str(_REQUEST_S)),
        *("--max-failures", "5"),
        *("--generation-database", "none"),
        *("--warnings", "off"),
        *("--output-sanitize", "false"),
        "--no-color",
    ]
    return subprocess.run(
        command,
        cwd=BUILD,  # where it looks for a configuration
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_MOST_S,
        check=False,
    )


def _answers(on: Cluster) -> Counter[str]:
    counted: Counter[str] = Counter()
    for labels, count in on.metrics(on.pod("router")).get(_REQUESTS, {}).items():
        counted[dict(labels)["status"]] += int(count)
    return counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=20, help="for each of both documents")
    given, options = parser.parse_known_args()
    with cluster() as running:
        outcome = run(running, "--max-time", str(given.seconds), *options)
    answers = ", ".join(f"{count} of {status}" for status, count in sorted(outcome.answers.items()))
    print(f"api          {answers}", flush=True)
    if outcome.code != 0:
        print(outcome.output, flush=True)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
