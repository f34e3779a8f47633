"""NVIDIA Dynamo with its mocker: a frontend, and simulated engines that prefill or decode.

Discovery by files, requests by tcp, events by ZeroMQ: nothing else runs. The mocker has its own
times: these speeds bring a prompt's to next to nothing and a token's to 10 ms, as the others'
engines have them.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.router.sites import Cores, Site, start, wait_ready
from tests.ports import free_port

_SPEED, _DECODE_SPEED = "1000", "0.00057"
_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
_MIGRATIONS = "3"
"""Off by default. With it a request goes on elsewhere when its worker is lost, as ours do."""


@contextlib.contextmanager
def dynamo(python: Path, cores: Cores, model: Path, pairs: int) -> Iterator[Site]:
    port = free_port()
    with contextlib.ExitStack() as closing:
        folder = closing.enter_context(tempfile.TemporaryDirectory())
        env = {**os.environ, "DYN_FILE_KV": folder, "HF_HUB_OFFLINE": "1", "DYN_LOG": "warn"}
        env.pop("PYTHONPATH", None)
        common = [*_PLANES]
        mocker = [str(python), "-m", "dynamo.mocker", "--model-path", str(model)]
        mocker += ["--model-name", "bench", "--speedup-ratio", _SPEED]
        mocker += ["--decode-speedup-ratio", _DECODE_SPEED]
        workers = [
            [
                start(closing, "dynamo-mocker", cores.driver,
                      [*mocker, "--disaggregation-mode", role, *common], env=env)
                for role in ("prefill", "decode")
            ]
            for _ in range(pairs)
        ]  # fmt: skip
        frontend = [str(python), "-m", "dynamo.frontend", "--http-port", str(port)]
        frontend += ["--http-host", "127.0.0.1", "--router-mode", "round-robin"]
        frontend += ["--migration-limit", _MIGRATIONS, "--enforce-disagg"]
        router = start(closing, "dynamo", cores.router, [*frontend, *common], env=env)
        site = Site("dynamo", port, psutil.Process(router.pid), workers)
        wait_ready(site, router)
        yield site
