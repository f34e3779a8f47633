"""Covers scripts.pictures: the drawn pictures are those that the script draws, they are whole, and
each page that shows one says in words what is on it.
"""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import pictures

pytestmark = pytest.mark.slow

PICTURES = pictures.files()
_WIDTH = 860
_LETTER = 6.6  # of a small text, on average


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_it_is_up_to_date(path: Path) -> None:
    assert (pictures.ROOT / path).read_text() == PICTURES[path], "run: make docs"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_texts_are_within_it(path: Path) -> None:
    root = ElementTree.fromstring(PICTURES[path])
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    assert len(texts) > 10
    for one in texts:
        long = len(one.text or "") * _LETTER
        left = (
            float(one.attrib["x"])
            - long * {"start": 0, "middle": 0.5, "end": 1}[one.attrib["text-anchor"]]
        )
        assert left >= 0, one.text
        assert left + long <= _WIDTH, one.text


def test_both_pools_follow_what_is_asked_of_them() -> None:
    """In the picture: prefill's line is at its highest before decode's."""
    text = pictures.scaling()
    highest = {}
    for role in ("prefill", "decode"):
        [path] = re.findall(rf'class="{role}-line" d="(M\d+ [^"]+H\d+)"', text)
        steps = re.findall(r"H(\d+)V([\d.]+)", path)
        assert len(steps) > 4
        highest[role] = int(min(steps, key=lambda step: float(step[1]))[0])
    assert highest["prefill"] + 200 < highest["decode"]


def test_pages_show_them_with_words() -> None:
    page = (pictures.ROOT / "docs" / "concepts.md").read_text()
    for path in PICTURES:
        [words] = re.findall(rf"!\[([^]]+)\]\(images/{path.name}\)", page)
        assert len(words) > 80
