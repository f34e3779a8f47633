"""`pdcluster serve FOLDER`: ready, the tokens of transformers' `generate`, gone after Ctrl-C."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest
from openai import OpenAI

from tests.cluster import PDCLUSTER, pdcluster, port_taken, said_until_ready
from tests.e2e.test_quickstart import processes_with
from tests.ports import free_port
from tests.reference import Reference

DEADLINE_S = 90


@pytest.mark.timeout(180)
def test_serve(model: Path, reference: Reference, tmp_path: Path):
    port, state = free_port(), tmp_path / "state"
    options = ["--port", str(port), "--name", "tiny", "--dtype", "float32"]
    process = subprocess.Popen(
        [*PDCLUSTER, "serve", str(model), *options],
        env={**os.environ, "XDG_STATE_HOME": str(state)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = said_until_ready(process, port)
        prompt = "The river runs past the old mill and down to the"
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            answer = client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=20,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
        assert answer.choices[0].model_extra is not None
        assert answer.choices[0].model_extra["token_ids"] == reference.generate(prompt, 20)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, "".join(said) + rest
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)
    assert not port_taken("127.0.0.1", port)
    assert processes_with(state) == []


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("weights", "flags", "why"),
    [
        ("pytorch_model.bin", [], "its weights are pickles"),
        ("model.safetensors", ["--max-model-len", "1000000"], "1000000"),
        ("model.safetensors", ["--draft-model", "pickles"], "its weights are pickles"),
    ],
)
def test_a_model_that_is_refused_ends_it(
    model: Path, tmp_path: Path, weights: str, flags: list[str], why: str
):
    for name, last in (("served", weights), ("pickles", "pytorch_model.bin")):
        (tmp_path / name).mkdir()
        for file in model.iterdir():
            target = last if file.name == "model.safetensors" else file.name
            (tmp_path / name / target).symlink_to(file)
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    command = ["serve", "served", "--port", "0", *flags]
    done = pdcluster(*command, env=env, timeout_s=DEADLINE_S, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert said.count(why) == 1, said
    assert "starting again" not in said
    assert processes_with(tmp_path / "state") == []


def on_a_terminal(command: list[str], env: dict[str, str], until: str) -> tuple[int, str]:
    """What it draws on a terminal until it says a word, and its status after Ctrl-C."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    process = subprocess.Popen(
        command, env=env, stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    seen, over, stopped = "", time.monotonic() + DEADLINE_S, False
    try:
        while time.monotonic() < over and select.select([ours], [], [], DEADLINE_S)[0]:
            try:
                seen += os.read(ours, 65536).decode(errors="replace")
            except OSError:  # nobody has the other end any more
                break
            if until in seen and not stopped:
                process.send_signal(signal.SIGINT)
                stopped = True
        return process.wait(DEADLINE_S), seen
    finally:
        os.close(ours)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)


@pytest.mark.timeout(180)
def test_a_bar_shows_how_the_model_loads(model: Path, tmp_path: Path):
    port = free_port()
    options = ["--port", str(port), "--name", "tiny"]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    command = [*PDCLUSTER, "serve", str(model), *options]
    code, seen = on_a_terminal(command, env, f"ready: http://127.0.0.1:{port}/v1")
    assert code == 0, seen
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert re.search(r"tiny-c-\S+: loading the model: libraries +\S+ ", drawn), drawn
    assert drawn.index("loading the model") < drawn.index("ready: ")
    assert "loading" not in drawn[drawn.rindex(": ready") :]
