"""Covers pd_router.keys and who.who: whose key it is, keys that come and go, and what clients
have of their own."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import openai
import pytest

from pd_router import keys
from pd_router.classes import Client, Promises, RateLimit, SlaClass
from pd_router.errors import ApiError
from pd_router.keys import Keyring
from tests import client
from tests.pd_router.http_rig import MODEL, Rig, go, rig, says

ALICE, BOB = "sk-alice-0001", "sk-bob-0001"
QUESTION: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "alice").write_text(f"{ALICE}\n")
    (tmp_path / "bob").write_text(f"  {BOB}\n\nsk-bob-0002")
    return tmp_path


def loaded(folder: Path) -> Keyring:
    keyring = Keyring(folder)
    keyring.load()
    return keyring


def opens(keyring: Keyring, key: str) -> bool:
    try:
        keyring.client(f"Bearer {key}".encode())
    except ApiError as error:
        if error.status != 401:
            raise
        return False
    return True


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (f"Bearer {ALICE}", "alice"),
        (f"bearer   {ALICE} ", "alice"),
        (f"Bearer {BOB}", "bob"),
        ("Bearer sk-bob-0002", "bob"),
    ],
)
def test_each_line_is_a_key_of_the_client_that_the_file_is_named_after(
    folder: Path, header: str, name: str
) -> None:
    assert loaded(folder).client(header.encode()) == name


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer", b"Bearer ", ALICE.encode(), b"Basic " + ALICE.encode(),
               f"Bearer {ALICE}x".encode(), b"Bearer \xff\xfe", b"Bearer alice"],
)  # fmt: skip
def test_anything_else_is_a_401(folder: Path, header: bytes | None) -> None:
    refused: list[int] = []
    keyring = Keyring(folder, lambda: refused.append(1))
    keyring.load()
    with pytest.raises(ApiError) as caught:
        keyring.client(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert (b"www-authenticate", b"Bearer") in caught.value.headers
    assert ALICE not in str(caught.value)
    assert refused == [1]


def test_a_key_is_changed_without_a_gap(folder: Path) -> None:
    """As the kubelet does it: files are links into a folder that is swapped as a whole."""
    keyring = loaded(folder)
    (folder / "alice").write_text(f"{ALICE}\nsk-alice-0002\n")
    keyring.load()
    assert opens(keyring, ALICE)
    assert opens(keyring, "sk-alice-0002")
    (folder / "alice").write_text("sk-alice-0002\n")
    (folder / "bob").unlink()
    keyring.load()
    assert not opens(keyring, ALICE)
    assert opens(keyring, "sk-alice-0002")
    assert not opens(keyring, BOB)


def test_hidden_files_are_the_kubelets_own(folder: Path) -> None:
    (folder / "..2026").mkdir()
    (folder / "..2026" / "carol").write_text("sk-carol-0001")
    os.symlink("..2026", folder / "..data")
    os.symlink("..data/carol", folder / "carol")
    assert loaded(folder).client(b"Bearer sk-carol-0001") == "carol"


def test_what_cannot_be_read_changes_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = loaded(folder)
    folder.rename(folder.parent / "gone")
    keyring.load()
    keyring.load()
    assert opens(keyring, ALICE)
    assert [r.getMessage() for r in caplog.records].count(caplog.messages[-1]) == 1
    assert "stay as they are" in caplog.text


def test_what_is_no_file_holds_up_nobody(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    keyring = loaded(folder)
    (folder / "carol").mkdir()
    (folder / "dave").symlink_to("nowhere")
    os.mkfifo(folder / "erin")
    (folder / "bob").unlink()
    (folder / "frank").write_text("sk-frank-0001")
    keyring.load()
    assert [opens(keyring, key) for key in (ALICE, BOB, "sk-frank-0001")] == [True, False, True]
    assert all(f"{name} can't be read" in caplog.text for name in ("carol", "dave", "erin"))


def test_no_key_lets_nobody_in_and_says_so(tmp_path: Path, caplog: Any) -> None:
    keyring = loaded(tmp_path)
    assert not opens(keyring, "")
    assert not opens(keyring, ALICE)
    assert "no API key" in caplog.text


def test_bad_lines_do_not_hold_up_good_ones(folder: Path, caplog: Any) -> None:
    (folder / "carol").write_text(f"short\n{ALICE}\nsk-carol-0001\n")
    (folder / "dave").write_text("sk-dave-0001" * keys.MAX_FILE_BYTES)
    caplog.set_level(logging.WARNING)
    keyring = loaded(folder)
    assert keyring.client(b"Bearer sk-carol-0001") == "carol"
    assert keyring.client(f"Bearer {ALICE}".encode()) == "alice"
    assert "carol, line 1" in caplog.text
    assert "carol, line 2: is alice's key already" in caplog.text
    assert "dave can't be read" in caplog.text
    assert ALICE not in caplog.text


def test_the_folder_is_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "LOOK_S", 0.01)

    async def body() -> None:
        keyring = loaded(folder)
        task = asyncio.create_task(keyring.follow())
        (folder / "carol").write_text("sk-carol-0001")
        async with asyncio.timeout(10):
            while not opens(keyring, "sk-carol-0001"):
                await asyncio.sleep(0.01)
        task.cancel()

    go(body(), 20)


# ---- over HTTP --------------------------------------------------------------------------


async def status(r: Rig, method: str, path: str, *given: Any) -> int:
    answer = await client.request(r.http.host, r.http.port, method, path, *given)
    await answer.close()
    return answer.status


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("GET", "/nothing"),
    ],
)
def test_all_but_the_probes_needs_a_key(folder: Path, method: str, path: str) -> None:
    async def body() -> None:
        async with rig(keyring=loaded(folder)) as r:
            assert await status(r, method, path) == 401
            assert await status(r, method, path, None, {"authorization": f"Bearer {BOB}x"}) == 401
            assert await status(r, method, path, None, {"authorization": f"Bearer {BOB}"}) != 401
            assert await status(r, "GET", "/health") == 200

    go(body(), 30)


def test_a_client_has_its_class_and_is_a_tenant(folder: Path) -> None:
    promises = Promises((SlaClass("std"), SlaClass("vip")), clients={"alice": Client("vip")})

    async def body() -> None:
        async with rig(keyring=loaded(folder), promises=promises, class_header=True) as r:
            r.sessions.script = says(r.tokens("yes"))
            for key, named, sla in ((ALICE, "std", "vip"), (BOB, "vip", "vip"), (BOB, "", None)):
                headers = {"x-pdcluster-class": named} if named else {}
                async with openai.AsyncOpenAI(
                    base_url=f"http://{r.http}/v1", api_key=key, max_retries=0
                ) as asks:
                    await asks.chat.completions.create(**QUESTION, extra_headers=headers)
                asked = r.sessions.started[-1].request
                assert asked.tenant == ("alice" if key == ALICE else "bob")
                assert asked.sla == sla

    go(body(), 30)


def test_the_admin_port_tells_how_many_have_a_key(folder: Path) -> None:
    """The operator reads it: it has no right to the Secret."""

    async def told(keyring: Keyring | None) -> object:
        async with rig(keyring=keyring) as r:
            page = await client.request(r.admin.host, r.admin.port, "GET", "/sketches")
            found = await page.json()
            await page.close()
            return found["clients"]

    async def body() -> None:
        assert [await told(loaded(folder)), await told(None)] == [2, None]

    go(body(), 30)


def test_clients_share_no_prefix(folder: Path) -> None:
    """Else the time to the first token would tell one what another has sent."""
    salts = []

    async def body() -> None:
        async with rig(keyring=loaded(folder)) as r:
            r.sessions.script = says(r.tokens("yes"))
            for key in (ALICE, BOB, "sk-bob-0002"):
                async with openai.AsyncOpenAI(
                    base_url=f"http://{r.http}/v1", api_key=key, max_retries=0
                ) as asks:
                    for extra in ({}, {"cache_salt": "mine"}):
                        await asks.chat.completions.create(**QUESTION, extra_body=extra)
            salts.extend(one.request.cache_salt for one in r.sessions.started)

    go(body(), 30)
    alice, alices_own, bob, bobs_own, *other_key = salts
    assert len({alice, alices_own, bob, bobs_own, b""}) == 5
    assert other_key == [bob, bobs_own]


def test_a_client_has_limits_of_its_own() -> None:
    promises = Promises(
        limit=RateLimit(requests_per_minute=5),
        clients={"alice": Client(limit=RateLimit(requests_per_minute=50)), "bob": Client("x")},
    )
    assert promises.limit_of("alice").requests_per_minute == 50
    assert promises.limit_of("bob").requests_per_minute == 5
    assert promises.limit_of("").requests_per_minute == 5
