"""`pdcluster serve MODEL`: one worker that does everything, and its endpoint."""

import re
import sys
from pathlib import Path
from typing import Any

import click

_GGUF = b"GGUF"
"""How such a file begins."""


@click.command(name="serve")
@click.argument("model")
@click.option("--name", default="", help="The model's name as clients send it; else MODEL's own.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535),
              help="Port of the API on 127.0.0.1; 0 picks a free one.")  # fmt: skip
@click.option("--dtype", default="auto", show_default=True,
              type=click.Choice(["auto", "float32", "bfloat16", "float16"]))  # fmt: skip
@click.option("--max-model-len", type=click.IntRange(1), default=None,
              help="Tokens of a request, prompt and output; else the model's limit.")  # fmt: skip
@click.option("--kv-cache-tokens", type=click.IntRange(1), default=None,
              help="Tokens that the KV cache holds; else 16384.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1), default=None,
              help="CPU threads of the worker; else torch's choice.")  # fmt: skip
@click.option("--draft-model", default="", metavar="MODEL",
              help="A small model with the same tokenizer that guesses tokens for it.")  # fmt: skip
def command(
    model: str,
    name: str,
    port: int,
    dtype: str,
    max_model_len: int | None,
    kv_cache_tokens: int | None,
    threads: int | None,
    draft_model: str,
) -> None:
    """Serve MODEL on this machine behind an OpenAI-compatible endpoint, in the foreground.

    MODEL is the name of a model that comes with PDCluster (smollm2-135m-instruct), a folder
    in Hugging Face format, or a GGUF file. It is `pdcluster up` with one colocated worker and
    no file: prints "ready: URL" as soon as a request would succeed; Ctrl-C ends everything.
    """
    from pd_cli import session
    from pd_operator.local.cluster import Options

    limits = {"maxModelLen": max_model_len, "dtype": dtype}
    engine: dict[str, Any] = {"kvCacheTokens": kv_cache_tokens, "threads": threads}
    if draft_model:
        source, _ = _source(draft_model, "--draft-model")
        engine["speculation"] = {"method": "draft", "draftModel": {"source": source}}
    body = document(model, name, limits, engine)
    sys.exit(session.run_document(body, Options(port=port)))


def document(
    model: str, name: str, limits: dict[str, Any], engine: dict[str, Any]
) -> dict[str, Any]:
    """The PDCluster. What is None takes its default."""
    from pd_operator.api import API_VERSION, KIND

    source, own = _source(model, "MODEL")
    served = name or re.sub(r"[^A-Za-z0-9._-]+", "-", own).strip("-._") or "model"
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": _cluster_name(served)},
        "spec": {
            "model": {"name": served, "source": source, **_given(limits)},
            "colocated": {"replicas": 1, "engine": _given(engine)},
        },
    }


def _source(model: str, hint: str) -> tuple[dict[str, str], str]:
    """A model's source, and its own name. click.BadParameter says what is wrong with it."""
    from pd_operator.apiparts import BUILTIN_MODELS

    if model in BUILTIN_MODELS:
        return {"builtin": model}, model
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        return {"hostPath": str(path)}, path.name
    if not path.is_file():
        raise click.BadParameter(
            f"{path} is no folder and no file; give a folder in Hugging Face format, "
            f"a GGUF file, or "
            f"{' or '.join(BUILTIN_MODELS)}",
            param_hint=hint,
        )
    with path.open("rb") as file:
        if file.read(len(_GGUF)) != _GGUF:
            raise click.BadParameter(f"{path} is no GGUF file: copy it again", param_hint=hint)
    return {"hostPath": str(path)}, path.stem


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _cluster_name(served: str) -> str:
    """What Kubernetes would take: `pdcluster status` and `down` know it by this."""
    from pd_operator.api import MAX_NAME_LENGTH

    plain = re.sub(r"[^a-z0-9]+", "-", served.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"model-{plain}"
    return named[:MAX_NAME_LENGTH].strip("-")
