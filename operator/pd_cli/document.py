"""A PDCluster file: YAML or JSON, one document, no key twice."""

import os
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

_MAX_BYTES = 1 << 20


class BadFile(Exception):
    """The file can't be read as one mapping; the message names the place."""


class _Loader(yaml.SafeLoader):
    """Of two keys of one name YAML takes the last one: more likely, one is a slip."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(getattr(key_node, "value", ""))
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f'"{key}" stands there twice; keep one', key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: Path) -> dict[str, Any]:
    """The file's only document, as YAML gives it. BadFile with the place of what is wrong."""
    try:
        # Without waiting: a pipe's other end may never come.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise BadFile(f"{path}: isn't a file; name a PDCluster file")
            with open(descriptor, "rb", closefd=False) as opened:
                data = opened.read(_MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}; name a PDCluster file") from None
    if len(data) > _MAX_BYTES:
        raise BadFile(f"{path}: is larger than 1 MiB; name a PDCluster file")
    documents = _documents(path, data)
    if not documents:
        raise BadFile(f"{path}: is empty; write a PDCluster (see examples/quickstart.yaml)")
    if len(documents) > 1:
        raise BadFile(f"{path}: holds {len(documents)} documents; write one PDCluster a file")
    if not isinstance(documents[0], dict):
        raise BadFile(f"{path}: holds no mapping; write a PDCluster (see examples/quickstart.yaml)")
    return documents[0]


def _documents(path: Path, data: bytes) -> list[Any]:
    try:
        text = data.decode()
        found = list(yaml.load_all(text, Loader=_Loader))
    except UnicodeDecodeError as error:
        raise BadFile(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise BadFile(f"{path}{place}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise BadFile(f"{path}: is no YAML: {error}") from None
    return [document for document in found if document is not None]
