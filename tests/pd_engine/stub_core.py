"""As much of a worker's core as its announcements and streams need: no model, nothing to do."""

from types import SimpleNamespace
from typing import Any

from pd_engine.outbox import Outbox
from pd_engine.types import PrefixChanges
from pd_proto.v1 import engine_pb2 as pb


def stub_core(*, computed_pairs: int = 0) -> Any:
    """Idle and well. `computed_pairs`: what its metrics say."""
    fields = {one.name: 0 for one in pb.Load.DESCRIPTOR.fields if one.name != "step_s"}
    load = SimpleNamespace(**fields)
    return SimpleNamespace(
        open_stream=lambda: (1, Outbox()),
        close_stream=lambda _: None,
        handle=lambda *_: None,
        commands_done=lambda: None,
        scheduler=SimpleNamespace(load=lambda: load),
        metrics=SimpleNamespace(busy_s=0.0, computed_tokens=0, computed_pairs=computed_pairs),
        draining=False,
        sharing=SimpleNamespace(exact=True),
        steps=0,
        step_median_s=lambda: 0.0,
        take_prefix_changes=PrefixChanges,
        prefixes=lambda: [],
    )
