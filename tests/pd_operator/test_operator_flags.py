"""The operator's flags, and kopf's settings."""

import itertools

import kopf
import pytest

from pd_operator import flags, handlers


def test_a_namespaced_operator():
    found = flags.parse(["--namespace=team", "--engine-image=e:1", "--router-image=r:1"])
    options = found.options
    assert (options.namespace, options.lease_namespace) == ("team", "team")
    assert (options.settings.engine_image, options.settings.router_image) == ("e:1", "r:1")
    assert (found.metrics_port, found.health_port) == (9090, 8081)
    assert options.identity != flags.parse(["--namespace=team"]).options.identity


def test_a_cluster_wide_operator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POD_NAMESPACE", "system")
    options = flags.parse(["--cluster-wide", "--resync-s=30", "--runners=2"]).options
    assert (options.namespace, options.lease_namespace) == ("", "system")
    assert (options.resync_s, options.runners) == (30, 2)
    assert flags.parse(["--cluster-wide", "--lease-namespace=x"]).options.lease_namespace == "x"


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["--namespace=a", "--cluster-wide"],
        ["--cluster-wide", "--metrics-port=70000"],
        ["--cluster-wide", "--resync-s=0"],
        ["--cluster-wide", "--resync-s=nan"],
        ["--cluster-wide", "--runners=0"],
        ["--cluster-wide", "--lease-duration-s=5"],
        ["--cluster-wide", "--unknown"],
    ],
)
def test_what_makes_no_sense(wrong: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        flags.parse(wrong)
    assert ended.value.code not in (0, None)
    capsys.readouterr()


def test_kopf_writes_nothing_and_gives_nothing_up():
    made = handlers.settings()
    assert made.peering.standalone
    assert not made.posting.enabled
    assert made.scanning.disabled
    assert not made.watching.initial_streaming  # or any error in a stream ends the operator
    delays = list(itertools.islice(iter(made.networking.error_backoffs), 1000))
    assert max(delays) <= 5
    nowhere = made.persistence.diffbase_storage
    assert isinstance(nowhere, kopf.DiffBaseStorage)
    assert nowhere is made.persistence.progress_storage
