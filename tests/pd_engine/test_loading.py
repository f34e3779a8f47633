"""Covers pd_engine.loading: while a real model loads, probes hear how many of its weights there
are, and afterwards the bar of transformers is its own again.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from pd_engine.checkpoint import ModelError, open_checkpoint
from pd_engine.health import Health
from pd_engine.model import load_model
from tests.tiny_model import tiny_model_dir


async def probed(health: Health) -> tuple[int, str]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        raise AssertionError("nobody reads a probe")

    await health({"type": "http", "path": "/readyz"}, receive, send)
    return sent[0]["status"], sent[1]["body"].decode()


def test_probes_hear_of_each_weight() -> None:
    health = Health()
    answers = [asyncio.run(probed(health))]

    def heard(what: str, done: int, total: int) -> None:
        health.loading.report(what, done, total)
        answers.append(asyncio.run(probed(health)))

    loaded = load_model(open_checkpoint(tiny_model_dir()), "float32", torch.device("cpu"), heard)
    total = len(loaded.module.state_dict())
    assert total > 20
    assert answers == [
        (503, "loading the model: libraries\n"),
        *((503, f"loading the model: weights, {done} of {total}\n") for done in range(total + 1)),
    ]


def test_transformers_bar_is_its_own_again(tmp_path: Path) -> None:
    before = transformers_logging.set_tqdm_hook(None)
    transformers_logging.set_tqdm_hook(before)
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_model_dir().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    load_model(open_checkpoint(folder), "float32", torch.device("cpu"))
    [weights] = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="copy or convert the model again"):
        load_model(open_checkpoint(folder), "float32", torch.device("cpu"))
    assert transformers_logging.set_tqdm_hook(before) is before
