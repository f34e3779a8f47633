"""A router with its instant engines, started and ended: ours and the compiled peers.

Peers come from PyPI into an environment of their own each, in the cache folder; where that
fails they are missing, and so are their figures.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.common import OUT, ROOT
from bench.router.load import PATH
from tests.ports import free_port, free_ports

PEERS = ("vllm-router", "smg")
_START_DEADLINE_S = 180.0


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores the router has, and which all that drives it."""

    router: frozenset[int]
    driver: frozenset[int]

    @classmethod
    def split(cls) -> "Cores":
        """One for the router: what is compared is what a core does."""
        usable = sorted(os.sched_getaffinity(0))
        return cls(frozenset(usable[:1]), frozenset(usable[1:] or usable))


@dataclass(slots=True)
class Site:
    """A router that serves at `port`, and the engines behind it, by pair."""

    name: str
    port: int
    router: psutil.Process
    pairs: list[list[subprocess.Popen[str]]] = field(default_factory=list)

    def cpu_s(self) -> float:
        """Of the router since its start, all its processes."""
        return sum(_cpu_s(process) for process in self._processes())

    def rss_mib(self) -> float:
        return sum(float(process.memory_info().rss) for process in self._processes()) / (1 << 20)

    def _processes(self) -> list[psutil.Process]:
        return [self.router, *self.router.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def ours(cores: Cores, model: Path, pairs: int = 1, apart: bool = False) -> Iterator[Site]:
    """Our router. `apart`: each worker in a process of its own, so that it can be killed."""
    http, control = free_ports(2)
    with contextlib.ExitStack() as closing:
        router = start(
            closing, "ours", cores.router,
            [sys.executable, "-m", "pd_router", "--model=bench", "--router-name=bench",
             "--log-level=warning",  # as the peers
             f"--http=127.0.0.1:{http}", "--admin=127.0.0.1:0", f"--control=127.0.0.1:{control}"],
        )  # fmt: skip
        site = Site("ours", http, psutil.Process(router.pid))
        for pair in range(pairs):
            common = [sys.executable, "-m", "bench.router.workers", f"--name=w{pair}"]
            common += [f"--model-dir={model}", f"--control=127.0.0.1:{control}"]
            roles = [["prefill"], ["decode"]] if apart else [["prefill", "decode"]]
            commands = [[*common, *(f"--role={role}" for role in some)] for some in roles]
            site.pairs.append(_engines(closing, cores, "our-workers", commands))
        wait_ready(site, router)
        yield site


@contextlib.contextmanager
def peer(
    name: str, python: Path, cores: Cores, model: Path, pairs: int = 1, apart: bool = False
) -> Iterator[Site]:
    """A compiled router before instant HTTP engines, in its mode for prefill and decode."""
    port, *ports = free_ports(1 + 2 * pairs)
    prefill, decode = ports[:pairs], ports[pairs:]
    with contextlib.ExitStack() as closing:
        started = []
        for number in range(pairs):
            common = [sys.executable, "-m", "bench.router.engine", f"--model-dir={model}"]
            places = [f"--prefill={prefill[number]}", f"--decode={decode[number]}"]
            commands = [[*common, p] for p in places] if apart else [[*common, *places]]
            started.append(_engines(closing, cores, f"{name}-engines", commands))
        command = _PEER_COMMANDS[name](python, port, prefill, decode)
        router = start(closing, name, cores.router, command)
        site = Site(name, port, psutil.Process(router.pid), started)
        wait_ready(site, router)
        yield site


def _vllm_router(python: Path, port: int, prefill: list[int], decode: list[int]) -> list[str]:
    command = [str(python.parent / "vllm-router"), "--vllm-pd-disaggregation"]
    for at in prefill:
        command += ["--prefill", f"http://127.0.0.1:{at}"]
    for at in decode:
        command += ["--decode", f"http://127.0.0.1:{at}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    return [*command, "--log-level", "warning", "--prometheus-port", str(free_port())]


def _smg(python: Path, port: int, prefill: list[int], decode: list[int]) -> list[str]:
    command = [str(python), "-m", "smg.cli", "launch", "--pd-disaggregation"]
    for at in prefill:
        command += ["--prefill", f"http://127.0.0.1:{at}", "8998"]
    for at in decode:
        command += ["--decode", f"http://127.0.0.1:{at}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    return [*command, "--log-level", "warn", "--prometheus-port", str(free_port())]


_PEER_COMMANDS = {"vllm-router": _vllm_router, "smg": _smg}


def _engines(
    closing: contextlib.ExitStack, cores: Cores, name: str, commands: Sequence[Sequence[str]]
) -> list[subprocess.Popen[str]]:
    """Started, and serving."""
    started = [start(closing, name, cores.driver, command, waits=True) for command in commands]
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline() != "serving\n":
            raise RuntimeError(f"{name} didn't start: see {OUT}")
    return started


def start(
    closing: contextlib.ExitStack,
    name: str,
    cores: frozenset[int],
    command: Sequence[str],
    waits: bool = False,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    OUT.mkdir(exist_ok=True)
    log = closing.enter_context((OUT / f"router-{name}.log").open("a"))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if waits else log,
        stderr=log,
        text=True,
        env=env,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    closing.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def wait_ready(site: Site, router: subprocess.Popen[str]) -> None:
    """Until a request is answered."""
    body = b'{"model":"bench","prompt":"a","max_tokens":1,"stream":true,"seed":1000}'
    ask = b"POST %b HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n" % PATH.encode()
    ask += b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
    deadline = time.monotonic() + _START_DEADLINE_S
    answer = b""
    while time.monotonic() < deadline:
        if router.poll() is not None:
            raise RuntimeError(f"{site.name} ended: see {OUT}/router-{site.name}.log")
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", site.port), 2) as sock,
        ):
            sock.settimeout(5)
            sock.sendall(ask)
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
            if answer.startswith(b"HTTP/1.1 200") and b"[DONE]" in answer:
                return
        time.sleep(0.2)
    raise RuntimeError(f"{site.name} doesn't answer: {answer[:500]!r}")
