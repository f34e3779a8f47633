"""PURE. What exists of one kind, as the API server's lists, watch events and answers tell it.

A store hears of an object in two ways that don't wait for each other: by the watch, and by
the answers to our own writes, which are usually ahead of the watch. Resource versions order
the two (they are integers that grow, for all objects of a kind): whatever is older than
what is held is ignored, and an answer counts only while the watch hasn't come to it.

A list or a watch event may speak of an object that has been made again under its old name:
uids tell the two apart, whichever is heard of first.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from pd_operator.podparts import Manifest

Group = TypeVar("Group", bound=Hashable)
Name = tuple[str, str]
"""Namespace and name."""


def version_of(item: Manifest) -> int:
    return number(item["metadata"].get("resourceVersion", ""))


def number(version: str) -> int:
    """0 for what is no number: then the order of arrival decides."""
    return int(version) if version.isdecimal() else 0


def name_of(item: Manifest) -> Name:
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def uid_of(item: Manifest) -> str:
    return str(item["metadata"].get("uid", ""))


class Packing(NamedTuple):
    """Objects as text: as dicts, JSON takes five times its own size. Equal objects must give
    equal texts."""

    pack: Callable[[Manifest], bytes]
    unpack: Callable[[bytes], Manifest]


def _never(_: bytes) -> Manifest:
    raise AssertionError("nothing is packed here")


class _Held(Generic[Group]):
    """One object: its content without its version, packed or as it is."""

    __slots__ = ("content", "group", "text", "uid", "unpack", "version")

    def __init__(self, item: Manifest, group: Group | None, packing: Packing | None) -> None:
        metadata = {k: v for k, v in item["metadata"].items() if k != "resourceVersion"}
        plain = {**item, "metadata": metadata}
        self.unpack = packing.unpack if packing is not None else _never
        self.content: bytes | Manifest = packing.pack(plain) if packing is not None else plain
        self.group = group
        self.text = str(item["metadata"].get("resourceVersion", ""))
        self.version = number(self.text)
        self.uid = uid_of(item)

    def open(self) -> Manifest:
        content = self.content
        item = self.unpack(content) if isinstance(content, bytes) else content
        return {**item, "metadata": {**item["metadata"], "resourceVersion": self.text}}


class Store(Generic[Group]):
    """Objects by name and by group. Each change returns the groups that it matters to.

    `slim` says what of an object is kept, `group_of` to whom it belongs (None: to nobody).
    `packing`: objects are kept as text and parsed whenever they are asked for.
    """

    def __init__(
        self,
        group_of: Callable[[Manifest], Group | None],
        slim: Callable[[Manifest], Manifest] = lambda item: item,
        *,
        packing: Packing | None = None,
    ) -> None:
        self._group_of = group_of
        self._slim = slim
        self._packing = packing
        self._items: dict[Name, _Held[Group]] = {}
        self._groups: dict[Group, dict[Name, _Held[Group]]] = {}
        self.seen = 0  # the version that lists and the watch have come to
        self._gone: set[str] = set()  # uids that we deleted and the watch still tells of

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Manifest]:
        return (held.open() for held in self._items.values())

    def get(self, namespace: str, name: str) -> Manifest | None:
        held = self._items.get((namespace, name))
        return held.open() if held is not None else None

    def group(self, group: Group) -> list[Manifest]:
        return [held.open() for held in self._groups.get(group, {}).values()]

    def versions(self, group: Group) -> list[str]:
        """Of all objects of a group, in no particular order but the same while none changes."""
        return [held.text for held in self._groups.get(group, {}).values()]

    def groups(self) -> Iterable[Group]:
        return self._groups.keys()

    def relist(self, version: str, items: Iterable[Manifest], *, reset: bool = False) -> set[Group]:
        """A whole list, as of a version. What isn't in it is gone, unless we have heard of it
        from after that version. `reset`: versions began anew, whatever was held is void."""
        as_of = number(version)
        touched: set[Group] = set()
        listed = {name_of(item): self._hold(item) for item in items}
        self.seen = as_of if reset else max(self.seen, as_of)
        self._gone = set() if reset else self._gone & {held.uid for held in listed.values()}
        for name, held in list(self._items.items()):
            if name not in listed and (reset or held.version <= as_of):
                touched |= self._drop(name)
        for name, held in listed.items():
            touched |= self._put(name, held, force=reset)
        return touched

    def event(self, kind: str, item: Manifest) -> set[Group]:
        """ADDED, MODIFIED, DELETED or BOOKMARK, in the order of the watch."""
        self.seen = max(self.seen, version_of(item))
        if kind == "DELETED":
            return self._deleted(item)
        if kind in ("ADDED", "MODIFIED"):
            return self._put(name_of(item), self._hold(item))
        return set()

    def wrote(self, item: Manifest) -> set[Group]:
        """The answer to a write of ours."""
        if version_of(item) <= self.seen:
            return set()  # the watch has told of it, and maybe of what came after it
        return self._put(name_of(item), self._hold(item))

    def deleted(self, name: Name, uid: str) -> set[Group]:
        """The answer to a delete of ours: the object of that uid is no more."""
        held = self._items.get(name)
        if held is None or held.uid != uid:
            return set()
        self._gone.add(uid)
        return self._drop(name)

    def _deleted(self, item: Manifest) -> set[Group]:
        uid = uid_of(item)
        self._gone.discard(uid)
        held = self._items.get(name_of(item))
        if held is None or (held.uid != uid and held.version > version_of(item)):
            return set()  # that one went before; what is held came after it
        return self._drop(name_of(item))

    def _hold(self, item: Manifest) -> _Held[Group]:
        slim = self._slim(item)
        return _Held(slim, self._group_of(slim), self._packing)

    def _put(self, name: Name, new: _Held[Group], *, force: bool = False) -> set[Group]:
        if new.uid in self._gone:
            return set()
        held = self._items.get(name)
        if held is not None and not force and 0 < new.version <= held.version:
            return set()
        same = held is not None and held.content == new.content
        touched = self._drop(name) | self._store(name, new)
        # Newer, but nothing that we keep has changed: only the version is new.
        return set() if same else touched

    def _store(self, name: Name, held: _Held[Group]) -> set[Group]:
        self._items[name] = held
        if held.group is None:
            return set()
        self._groups.setdefault(held.group, {})[name] = held
        return {held.group}

    def _drop(self, name: Name) -> set[Group]:
        held = self._items.pop(name, None)
        if held is None or held.group is None:
            return set()
        members = self._groups[held.group]
        del members[name]
        if not members:
            del self._groups[held.group]
        return {held.group}
