"""`pdcluster estimate`: how large a prompt's KV is, and how long its hand-over takes."""

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pd_cli import output as outputs

if TYPE_CHECKING:
    from pd_core.estimate import Estimate, Link
    from pd_core.geometry import ModelKv

_BAD_INPUT = 2
_GPU = "an H100 at half of its peak"
_GPU_FLOPS = 0.5 * 989e12


@click.command(name="estimate")
@click.option("--model", required=True, help="A well-known name, or a path to a config.json.")
@click.option("--prompt", type=click.IntRange(1, 10**12), required=True, help="Tokens.")
@click.option(
    "--link",
    "link_text",
    multiple=True,
    help="A name (rdma-100g, nvlink4, …) or a rate (12.5GB/s, 100Gbit/s); may be repeated. "
    "Without it, all known links.",
)
@click.option(
    "--quantization",
    type=click.Choice(("none", "int8", "int4")),
    default="none",
    show_default=True,
    help="Of the KV on the wire.",
)
@click.option(
    "--dtype", help="Of the KV, where it isn't the config's: bfloat16, float16, float32, …"
)
@click.option(
    "--prefill-rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Tokens a second that prefill computes.",
)
@click.option(
    "--chunk",
    type=click.IntRange(min=0),
    default=512,
    show_default=True,
    help="Tokens; 0 computes the prompt whole.",
)
@outputs.option
@click.option("--json", "as_json", is_flag=True, hidden=True, help="As `--output json`.")
def command(
    model: str,
    prompt: int,
    link_text: tuple[str, ...],
    quantization: str,
    dtype: str | None,
    prefill_rate: float | None,
    chunk: int,
    output: str,
    as_json: bool,
) -> None:
    """Estimate the hand-over of a prompt's KV from prefill to decode.

    Rates are nominal ones; what a link really carries is less.
    """
    from dataclasses import replace

    from pd_core import estimate as core

    try:
        links = [core.link(text) for text in link_text] or list(core.LINKS.values())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--link") from error
    if prefill_rate is not None and not math.isfinite(prefill_rate):
        raise click.BadParameter("give a number", param_hint="--prefill-rate")
    try:
        kv, parameters = _model(model, dtype)
    except ValueError as error:
        click.echo(f"{model}: {error}", err=True)
        sys.exit(_BAD_INPUT)
    assumed = prefill_rate is None and parameters is not None
    if prefill_rate is None and parameters is not None:
        prefill_rate = _GPU_FLOPS / (2 * parameters)
    chunk = chunk or prompt
    if kv.latent and quantization != "none":
        quantization = "none"
        kv = replace(kv, notes=(*kv.notes, "latent KV is never quantized"))
    size = core.kv_bytes(kv, prompt, quantization)
    found: list[tuple[Link, Estimate | None]] = [(link, None) for link in links]
    if prefill_rate is not None:
        rate, wire = prefill_rate, quantization
        found = [
            (link, core.estimate(kv, prompt, link, rate, quantization=wire, chunk_tokens=chunk))
            for link in links
        ]
    if as_json or output == outputs.JSON:
        asked = {"model": model, "chunk_tokens": chunk}
        outputs.document(asked | _document(kv, prompt, quantization, size, prefill_rate, found))
        return
    click.echo(f"{model}: {kv.describe()}, {kv.token_bytes:,} B a token")
    plain = "" if quantization == "none" else f" in {quantization}"
    click.echo(f"{prompt:,} tokens: {_size(size)} of KV{plain}")
    for line in (*(f"note: {note}" for note in kv.notes), *_prefill(prompt, prefill_rate, assumed)):
        click.echo(line)
    for line in _table(size, found):
        click.echo(line)


def _prefill(prompt: int, rate: float | None, assumed: bool) -> list[str]:
    if rate is None:
        return ["say --prefill-rate to see what of the transfer hides behind prefill"]
    why = f", {_GPU}" if assumed else ""
    return [f"prefill: {_seconds(prompt / rate)} ({rate:,.0f} tokens/s{why})"]


def _model(name: str, dtype: str | None) -> tuple["ModelKv", float | None]:
    """A known model, or a config.json; and its parameters where they are known."""
    from dataclasses import replace

    from pd_core.geometry import ELEMENT_BYTES, UnknownGeometry, model_kv
    from pd_core.known_models import KNOWN_MODELS, find

    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UnknownGeometry(f"not a config.json: {error}") from error
        if not isinstance(config, dict):
            raise UnknownGeometry("not a config.json: no object")
        return model_kv(config, dtype), None
    known = find(name)
    if known is None:
        raise UnknownGeometry(
            f"neither a file nor one of {', '.join(KNOWN_MODELS)}; "
            "give the path of the model's config.json"
        )
    if dtype is None:
        return known.kv, known.active_parameters
    if dtype not in ELEMENT_BYTES:
        raise UnknownGeometry(f"dtype {dtype!r}: one of {', '.join(ELEMENT_BYTES)}")
    return replace(known.kv, dtype=dtype), known.active_parameters


def _table(size: int, found: list[tuple["Link", "Estimate | None"]]) -> list[str]:
    lines = [f"{'link':<12} {'rate':>10} {'transfer':>10} {'exposed':>10} {'hidden':>7}"]
    for link, made in found:
        transfer = made.transfer_s if made else size / link.bytes_s + link.round_trip_s
        exposed = _seconds(made.exposed_s) if made else "-"
        hidden = f"{made.hidden_share:.1%}" if made else "-"
        rate = f"{link.bytes_s / 1e9:,.4g} GB/s"
        lines.append(
            f"{link.name:<12} {rate:>10} {_seconds(transfer):>10} {exposed:>10} {hidden:>7}"
        )
    return lines


def _document(
    kv: "ModelKv",
    prompt: int,
    quantization: str,
    size: int,
    rate: float | None,
    found: list[tuple["Link", "Estimate | None"]],
) -> dict[str, object]:
    links = {
        link.name: {
            "bytes_s": link.bytes_s,
            "transfer_s": made.transfer_s if made else size / link.bytes_s + link.round_trip_s,
            "exposed_s": made.exposed_s if made else None,
            "hidden_share": made.hidden_share if made else None,
        }
        for link, made in found
    }
    return {
        "layers": kv.layers,
        "dtype": kv.dtype,
        "token_bytes": kv.token_bytes,
        "prompt_tokens": prompt,
        "quantization": quantization,
        "kv_bytes": size,
        "prefill_tokens_s": rate,
        "links": links,
        "notes": list(kv.notes),
    }


def _size(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:,.4g} {unit} ({size:,} B)"
    return f"{size} B"


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e6:.3g} us"
