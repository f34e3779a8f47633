"""Certificates of an authority of the PDCluster's own: what the Secrets hold is what routers and
workers take, foreign or broken content is made anew, keys stay in Secrets."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pd_core.identity import Identity, Part
from pd_operator import pki, tlsobjects
from pd_operator.applied import is_applied
from pd_operator.certificates import Certifier
from pd_operator.keys import Key
from pd_operator.observed import Ref
from pd_operator.podparts import Manifest
from pd_operator.tlsplan import Terms
from pd_proto.tls import Certificates
from tests.pd_operator.objects import cluster, flags, rendered

AUTO = cluster(**{"spec.security": {"tls": {"mode": "Auto"}}})
KEY = Key("default", "chat")
NOW = datetime.now(UTC).replace(microsecond=0)
TERMS = Terms()
Objects = dict[Ref, Manifest]


def ref(item: Manifest) -> Ref:
    return Ref(item["kind"], item["metadata"]["name"])


def look(objects: Objects, now: datetime = NOW, certifier: Certifier | None = None) -> list[str]:
    """As a reconcile does it; the names of what was written."""
    certifier = certifier or Certifier(TERMS)
    written = []

    def keep(item: Manifest) -> None:
        if not is_applied(item, objects.get(ref(item))):
            objects[ref(item)] = item
            written.append(item["metadata"]["name"])

    keep(certifier.authority(AUTO, objects, now))
    for item in certifier.certify(KEY, AUTO, objects, now).secrets:
        keep(item)
    return written


def begun() -> Objects:
    objects: Objects = {}
    assert look(objects) == ["chat-tls-ca", "chat-tls-router", "chat-tls-workers"]
    return objects


def files(objects: Objects, name: str) -> dict[str, bytes]:
    return tlsobjects.decoded(objects[Ref("Secret", name)])


def mounted(objects: Objects, part: Part, folder: Path) -> Certificates:
    """What a process makes of its Secret."""
    folder.mkdir(exist_ok=True)
    for name, text in files(objects, tlsobjects.secret_name(AUTO, part)).items():
        (folder / name).write_bytes(text)
    return Certificates(folder, Identity("default", "chat", part))


def shake_hands(client: Certificates, server: Certificates) -> str:
    """The URI that the server's certificate shows; raises where one refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.client_context.wrap_bio(to_client, to_server),
        server.server_context.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown: dict[str, Any] = ends[0].getpeercert() or {}
    return str(dict(shown["subjectAltName"])["URI"])


def test_routers_and_workers_take_them(tmp_path: Path) -> None:
    objects = begun()
    router = mounted(objects, Part.ROUTER, tmp_path / "router")
    worker = mounted(objects, Part.WORKER, tmp_path / "worker")
    assert shake_hands(router, worker) == worker.identity.uri
    assert shake_hands(worker, router) == router.identity.uri


def test_another_look_writes_nothing() -> None:
    objects = begun()
    assert look(objects) == []
    assert look(objects, NOW + timedelta(days=19)) == []


def test_how_old_they_are_is_told() -> None:
    objects, certifier = begun(), Certifier(TERMS)
    assert certifier.age_share(NOW) == 0.0
    for days, share in ((0, 0.0), (15, 0.5), (19, 19 / 30)):
        now = NOW + timedelta(days=days)
        assert look(objects, now, certifier) == []
        assert certifier.age_share(now) == pytest.approx(share, abs=0.01)
    late = NOW + timedelta(days=28)
    certifier.certify(KEY, AUTO, objects, late)  # and nobody can write what is due
    assert certifier.age_share(late) == pytest.approx(28 / 30, abs=0.01)
    look(objects, late, certifier)
    look(objects, late, certifier)
    assert certifier.age_share(late) == pytest.approx(0.0, abs=0.01)
    certifier.forget(KEY)
    assert certifier.age_share(late + timedelta(days=365)) == 0.0


def test_pods_mount_theirs_and_nobody_the_authority() -> None:
    wanted = rendered(AUTO)
    [router] = [one for one in wanted.surroundings if one["kind"] == "Deployment"]
    for item, name in (
        (router, "chat-tls-router"),
        *((pool.stateful_set, "chat-tls-workers") for pool in wanted.pools),
    ):
        spec = item["spec"]["template"]["spec"]
        secrets = [one["secret"]["secretName"] for one in spec["volumes"] if "secret" in one]
        assert secrets == [name, "chat-token"]
        assert flags(item)["tls-cluster"] == "default/chat"
        [mount] = [
            one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "peer-tls"
        ]
        assert mount["mountPath"] == flags(item)["tls-dir"]


def takes(one: dict[str, bytes], other: dict[str, bytes], part: Part) -> bool:
    """Whether who has the first Secret takes that part with the other one."""
    pair = pki.Pair(other["tls.crt"], other["tls.key"])
    bundle = pki.read_bundle(one["ca.crt"])
    return pki.read_leaf(pair, Identity("default", "chat", part), bundle) is not None


def test_those_of_before_and_those_of_now_take_each_other() -> None:
    """Through all of an authority's life and into the next one's."""
    objects = begun()
    authorities = {frozenset(files(objects, "chat-tls-ca"))}
    before, bundles = dict(objects), set()
    for day in (*range(10, 270, 10), *range(270, 285)):
        look(objects, NOW + timedelta(days=day))
        authorities.add(frozenset(files(objects, "chat-tls-ca")))
        bundles.add(files(objects, "chat-tls-router")["ca.crt"])
        for one, other in ((before, objects), (objects, before)):
            router, workers = files(one, "chat-tls-router"), files(other, "chat-tls-workers")
            assert takes(router, workers, Part.WORKER)
            assert takes(workers, router, Part.ROUTER)
        before = dict(objects)
    assert len(authorities) == len(bundles) == 3  # the first, both, the second
    assert look(objects, NOW + timedelta(days=284)) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tls.key", b"nonsense"),
        ("tls.crt", b""),
        ("tls.crt", b"\xff"),
        ("ca.crt", b"nonsense"),
        ("ca.crt", b""),
    ],
)
def test_what_is_broken_is_made_anew(file: str, text: bytes) -> None:
    objects = begun()
    name = Ref("Secret", "chat-tls-router")
    item = objects[name]
    data = {**item["data"], **tlsobjects.encoded({file: text})}
    objects[name] = {**item, "data": data}
    assert look(objects) == ["chat-tls-router"]
    assert look(objects) == []


def test_a_certificate_of_somebody_else_is_made_anew() -> None:
    """Not the other part's, and not one of another authority."""
    objects = begun()
    strange: Objects = begun()
    worker = objects[Ref("Secret", "chat-tls-workers")]
    name = Ref("Secret", "chat-tls-router")
    for data in (worker["data"], strange[name]["data"]):
        objects[name] = {**objects[name], "data": data}
        assert look(objects) == ["chat-tls-router"]
    assert (
        files(objects, "chat-tls-router")["ca.crt"] == files(objects, "chat-tls-workers")["ca.crt"]
    )


def test_lost_keys_cost_no_connection(tmp_path: Path) -> None:
    objects = begun()
    router = mounted(objects, Part.ROUTER, tmp_path / "router")
    del objects[Ref("Secret", "chat-tls-ca")]
    assert look(objects) == ["chat-tls-ca", "chat-tls-router", "chat-tls-workers"]
    worker = mounted(objects, Part.WORKER, tmp_path / "worker")
    shake_hands(router, worker)
    shake_hands(worker, router)
    assert look(objects) == []


def test_without_the_authoritys_secret_nothing_is_issued() -> None:
    """Somebody has the name: what isn't kept must not be used."""
    certifier = Certifier(TERMS)
    certified = certifier.certify(KEY, AUTO, {}, NOW)
    assert certified.secrets == ()
    assert certifier.settled(KEY, AUTO, {}, NOW) is None


def test_a_settled_look_costs_nothing_until_it_is_due() -> None:
    objects = begun()
    certifier = Certifier(TERMS)
    assert certifier.settled(KEY, AUTO, objects, NOW) is None
    certified = certifier.certify(KEY, AUTO, objects, NOW)
    assert certifier.settled(KEY, AUTO, dict(objects), NOW) is certified
    assert certified.due is not None
    assert certifier.settled(KEY, AUTO, objects, certified.due) is None
    changed = {**objects, Ref("Secret", "chat-tls-router"): {"metadata": {"name": "other"}}}
    assert certifier.settled(KEY, AUTO, changed, NOW) is None
    certifier.forget(KEY)
    assert certifier.settled(KEY, AUTO, objects, NOW) is None


def test_keys_are_shown_nowhere() -> None:
    pair = pki.make_authority(NOW, TERMS.authority)
    known = pki.read_authority(pair)
    assert known is not None
    assert "PRIVATE" in pair.key.decode()
    certified = Certifier(TERMS).certify(KEY, AUTO, begun(), NOW)
    encoded = files({ref(one): one for one in certified.secrets}, "chat-tls-router")["tls.key"]
    shown = f"{pair!r} {known!r} {certified!r}"
    assert "PRIVATE" not in shown
    assert tlsobjects.encoded({"": encoded})[""] not in shown


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
@pytest.mark.parametrize("value", [0x00, 0xFF])
def test_no_content_of_a_secret_stops_the_operator(value: int) -> None:
    """Each byte of a certificate changed: it's refused, and nothing else happens."""
    pair = pki.make_authority(NOW, TERMS.authority)
    known = pki.read_authority(pair)
    assert known is not None
    who = Identity("default", "chat", Part.WORKER)
    leaf = pki.make_leaf(known, who, NOW, TERMS.leaf)
    for whole, read in (
        (pair, lambda text: pki.read_authority(pki.Pair(text, pair.key))),
        (leaf, lambda text: pki.read_leaf(pki.Pair(text, leaf.key), who, [known])),
    ):
        plain = ssl.PEM_cert_to_DER_cert(whole.certificate.decode())
        assert read(whole.certificate) is not None
        for place in range(len(plain)):
            changed = plain[:place] + bytes([value]) + plain[place + 1 :]
            text = ssl.DER_cert_to_PEM_cert(changed).encode()
            assert read(text) is None or changed == plain
            pki.read_bundle(whole.certificate + text)


def test_a_leaf_is_no_authority() -> None:
    known = pki.read_authority(pki.make_authority(NOW, TERMS.authority))
    assert known is not None
    leaf = pki.make_leaf(known, Identity("default", "chat", Part.WORKER), NOW, TERMS.leaf)
    assert pki.read_authority(leaf) is None
