"""A whole router in the test's process, as `__main__` puts it together, before fake workers
over real gRPC that have the tiny model's tokenizer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pd_proto.v1 import engine_pb2 as pb
from pd_router.admission import Admission, AdmissionConfig
from pd_router.app import AppSettings, RouterApp
from pd_router.http import HttpServer, bind
from pd_router.journal import Journal
from pd_router.metrics import Metrics
from pd_router.session import Sessions
from pd_router.settings import Address
from pd_router.texts import Texts
from pd_router.workers import Workers, WorkersConfig
from tests.pd_router.fake_worker import MODEL, FakeKv, FakeWorker
from tests.pd_router.rig import until
from tests.tiny_model import tiny_model_dir


class Tiny(FakeWorker):
    """A worker with a real tokenizer."""

    def bundle(self) -> pb.TokenizerBundle:
        text = (tiny_model_dir() / "tokenizer.json").read_bytes()
        return pb.TokenizerBundle(
            bundle_hash=self.bundle_hash, tokenizer_json=text, eos_token_ids=[2], vocab_size=512
        )


@dataclass
class Whole:
    http: Address
    app: RouterApp
    workers: Workers
    sessions: Sessions
    metrics: Metrics
    journal: Journal
    control: str
    kv: FakeKv = field(default_factory=FakeKv)
    fakes: list[FakeWorker] = field(default_factory=list)

    async def add(self, role: str, name: str, **options: Any) -> Tiny:
        """Starts a worker and waits until it is usable."""
        fake = Tiny(role, name, self.kv, **options)
        self.fakes.append(fake)
        await fake.start(self.control)
        await until(
            lambda: any(v.usable and v.id.epoch == fake.epoch for v in self.workers.views()),
            f"{name} is usable",
        )
        return fake


@asynccontextmanager
async def whole(*, on_demand: bool = False, **settings: Any) -> AsyncIterator[Whole]:
    made = WorkersConfig(
        MODEL, "router-0", heartbeat_s=0.1, lapse_s=0.6, check_s=0.05,
        started_on_demand=on_demand,
    )  # fmt: skip
    workers, metrics = Workers(made), Metrics(MODEL)
    port = await workers.start("127.0.0.1", 0)
    sessions = Sessions(workers, Admission(AdmissionConfig()), hooks=metrics)
    texts, journal = Texts(workers), Journal(metrics)
    app = RouterApp(AppSettings(MODEL, **settings), workers, sessions, texts, metrics, journal)
    server = HttpServer(app, bind(Address("127.0.0.1", 0)))
    control = f"127.0.0.1:{port}"
    found = Whole(server.address, app, workers, sessions, metrics, journal, control)
    try:
        async with server.serving():
            yield found
    finally:
        for fake in found.fakes:
            await fake.die()
        sessions.close()
        await texts.close()
        await workers.close()
