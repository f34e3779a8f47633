"""PURE. What exists of one kind, as the API server's lists, watch events and answers tell it.

A store hears of an object in two ways that don't wait for each other: by the watch, and by
the answers to our own writes, which are usually ahead of the watch. Resource versions order
the two (they are integers that grow, for all objects of a kind): whatever is older than
what is held is ignored, and an answer counts only while the watch hasn't come to it.

A list or a watch event may speak of an object that has been made again under its old name:
uids tell the two apart, whichever is heard of first.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

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


class Store(Generic[Group]):
    """Objects by name and by group. Each change returns the groups that it matters to.

    `slim` says what of an object is kept, `group_of` to whom it belongs (None: to nobody).
    """

    def __init__(
        self,
        group_of: Callable[[Manifest], Group | None],
        slim: Callable[[Manifest], Manifest] = lambda item: item,
    ) -> None:
        self._group_of = group_of
        self._slim = slim
        self._items: dict[Name, Manifest] = {}
        self._groups: dict[Group, dict[Name, Manifest]] = {}
        self.seen = 0  # the version that lists and the watch have come to
        self._gone: set[str] = set()  # uids that we deleted and the watch still tells of

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Manifest]:
        return iter(self._items.values())

    def get(self, namespace: str, name: str) -> Manifest | None:
        return self._items.get((namespace, name))

    def group(self, group: Group) -> tuple[Manifest, ...]:
        return tuple(self._groups.get(group, {}).values())

    def groups(self) -> Iterable[Group]:
        return self._groups.keys()

    def relist(self, version: str, items: Iterable[Manifest], *, reset: bool = False) -> set[Group]:
        """A whole list, as of a version. What isn't in it is gone, unless we have heard of it
        from after that version. `reset`: versions began anew, whatever was held is void."""
        as_of = number(version)
        touched: set[Group] = set()
        listed: dict[Name, Manifest] = {name_of(item): item for item in items}
        self.seen = as_of if reset else max(self.seen, as_of)
        self._gone = set() if reset else self._gone & {uid_of(item) for item in listed.values()}
        for name, held in list(self._items.items()):
            if name not in listed and (reset or version_of(held) <= as_of):
                touched |= self._drop(name)
        for item in listed.values():
            touched |= self._put(item, force=reset)
        return touched

    def event(self, kind: str, item: Manifest) -> set[Group]:
        """ADDED, MODIFIED, DELETED or BOOKMARK, in the order of the watch."""
        self.seen = max(self.seen, version_of(item))
        if kind == "DELETED":
            return self._deleted(item)
        if kind in ("ADDED", "MODIFIED"):
            return self._put(item)
        return set()

    def wrote(self, item: Manifest) -> set[Group]:
        """The answer to a write of ours."""
        if version_of(item) <= self.seen:
            return set()  # the watch has told of it, and maybe of what came after it
        return self._put(item)

    def deleted(self, name: Name, uid: str) -> set[Group]:
        """The answer to a delete of ours: the object of that uid is no more."""
        held = self._items.get(name)
        if held is None or uid_of(held) != uid:
            return set()
        self._gone.add(uid)
        return self._drop(name)

    def _deleted(self, item: Manifest) -> set[Group]:
        uid = uid_of(item)
        self._gone.discard(uid)
        held = self._items.get(name_of(item))
        if held is None or (uid_of(held) != uid and version_of(held) > version_of(item)):
            return set()  # that one went before; what is held came after it
        return self._drop(name_of(item))

    def _put(self, item: Manifest, *, force: bool = False) -> set[Group]:
        if uid_of(item) in self._gone:
            return set()
        name = name_of(item)
        held = self._items.get(name)
        if held is not None and not force and 0 < version_of(item) <= version_of(held):
            return set()
        slim = self._slim(item)
        if held is not None and _says_the_same(held, slim):
            # Newer, but nothing that we keep has changed: remember the version only.
            self._store(name, slim)
            return set()
        touched = self._drop(name)
        return touched | self._store(name, slim)

    def _store(self, name: Name, item: Manifest) -> set[Group]:
        self._items[name] = item
        group = self._group_of(item)
        if group is None:
            return set()
        self._groups.setdefault(group, {})[name] = item
        return {group}

    def _drop(self, name: Name) -> set[Group]:
        held = self._items.pop(name, None)
        group = self._group_of(held) if held is not None else None
        if group is None:
            return set()
        members = self._groups[group]
        del members[name]
        if not members:
            del self._groups[group]
        return {group}


def _says_the_same(a: Manifest, b: Manifest) -> bool:
    return all(a.get(key) == b.get(key) for key in a.keys() | b.keys() if key != "metadata") and (
        _metadata(a) == _metadata(b)
    )


def _metadata(item: Manifest) -> dict[str, Any]:
    return {key: value for key, value in item["metadata"].items() if key != "resourceVersion"}
