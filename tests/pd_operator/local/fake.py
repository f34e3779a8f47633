"""A program for tests of the local backend: `python fake.py engine|router|convert FLAGS`.

It takes the flags of the real ones, answers their probes, and misbehaves as its
environment says:

FAKE_EXIT=TEXT         says TEXT and exits with 3
FAKE_EXIT_CODE=N       and with N instead of 3
FAKE_EXIT_UNLESS=PATH  the same, until the file PATH is there
FAKE_IGNORE_TERM=1     SIGTERM does nothing
FAKE_TERM_S=S          takes so long to end after SIGTERM
FAKE_UNREADY_UNLESS=P  /readyz is 503 until the file P is there
FAKE_DEAF=1            serves nothing
FAKE_CHILD=PATH        starts a process that sleeps, and writes its pid to the file
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        held = os.environ.get("FAKE_UNREADY_UNLESS")
        unready = self.path == "/readyz" and held and not Path(held).exists()
        body = b'{"ttft_s": {}, "tpot_s": {}}' if self.path == "/sketches" else b"ok"
        self.send_response(503 if unready else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        del arguments


class Server(ThreadingHTTPServer):
    reuse_port = False
    allow_reuse_address = True
    daemon_threads = True

    def server_bind(self) -> None:
        if self.reuse_port:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


class SharedServer(Server):
    reuse_port = True


def serve(address: str, shared: bool = False) -> None:
    host, _, port = address.rpartition(":")
    server = (SharedServer if shared else Server)((host, int(port)), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def misbehave() -> None:
    text = os.environ.get("FAKE_EXIT")
    unless = os.environ.get("FAKE_EXIT_UNLESS")
    if unless and not Path(unless).exists():
        text = f"waits for {Path(unless).name}"
    if text:
        print(text, flush=True)
        sys.exit(int(os.environ.get("FAKE_EXIT_CODE", "3")))
    child = os.environ.get("FAKE_CHILD")
    if child:
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(child).write_text(str(sleeper.pid))


def on_term(number: int, frame: object) -> None:
    del number, frame
    if not os.environ.get("FAKE_IGNORE_TERM"):
        time.sleep(float(os.environ.get("FAKE_TERM_S", "0")))
        print("ended by SIGTERM", flush=True)
        os._exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, on_term)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("what", choices=["engine", "router", "convert"])
    for name in ("host", "health-port", "http", "admin", "out"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--reuse-port", action="store_true")
    flags, _ = parser.parse_known_args()
    misbehave()
    if flags.what == "convert":
        print('{"stage": "weights", "done": 1, "total": 2}', flush=True)
        Path(flags.out).mkdir(parents=True, exist_ok=True)
        return
    if not os.environ.get("FAKE_DEAF"):
        if flags.what == "engine":
            serve(f"{flags.host}:{flags.health_port}")
        else:
            serve(flags.admin)
            serve(flags.http, flags.reuse_port)
    print("serving", flush=True)
    while True:  # pause() would sleep through a signal that another thread took
        time.sleep(0.02)


if __name__ == "__main__":
    main()
