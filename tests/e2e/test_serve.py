"""`pdcluster serve FOLDER`: ready, the tokens of transformers' `generate`, gone after Ctrl-C."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from openai import OpenAI

from tests.cluster import PDCLUSTER, port_taken, said_until_ready
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
