"""The store: lists, watch events and answers to our own writes in every order that can happen;
objects made again under their old names; restored backups; groups; what is no change.
"""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pd_operator.informer import PACKING
from pd_operator.podparts import Manifest
from pd_operator.store import Store, name_of, uid_of, version_of


def item(name: str, version: int, uid: str = "u1", group: str = "a", **fields: Any) -> Manifest:
    metadata = {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": {"group": group}}, **fields}


def store(*, packs: bool = False) -> Store[str]:
    packing = PACKING if packs else None
    return Store(lambda one: one["metadata"]["labels"]["group"] or None, packing=packing)


def held(of: Store[str], name: str = "x") -> int:
    """The version held, 0 without any."""
    found = of.get("ns", name)
    return version_of(found) if found else 0


def test_a_list_then_events():
    made = store()
    assert made.relist("5", [item("x", 3), item("y", 4, group="b")]) == {"a", "b"}
    assert made.event("MODIFIED", item("x", 6, spec=1)) == {"a"}
    assert made.event("ADDED", item("z", 7)) == {"a"}
    assert [one["metadata"]["name"] for one in made.group("a")] == ["x", "z"]
    assert made.event("DELETED", item("x", 8)) == {"a"}
    assert set(made.groups()) == {"a", "b"}
    assert made.event("DELETED", item("y", 9, group="b")) == {"b"}
    assert made.group("b") == []
    assert len(made) == 1


def test_what_a_list_lacks_has_been_deleted():
    made = store()
    made.relist("5", [item("x", 3), item("y", 4, group="b")])
    assert made.relist("9", [item("x", 3)]) == {"b"}
    assert made.get("ns", "y") is None


def test_our_own_write_is_known_before_the_watch_tells():
    made = store()
    made.relist("5", [item("x", 3)])
    made.wrote(item("x", 8, spec=2))
    assert made.event("MODIFIED", item("x", 6, spec=1)) == set()
    assert held(made) == 8
    assert made.event("MODIFIED", item("x", 8, spec=2)) == set()  # its echo is no change


def test_a_late_answer_does_not_bring_back_what_the_watch_has_seen_deleted():
    made = store()
    made.relist("5", [])
    made.event("ADDED", item("x", 6))
    made.event("DELETED", item("x", 7))
    made.wrote(item("x", 6))
    assert held(made) == 0


def test_our_own_delete_is_known_before_the_watch_tells():
    made = store()
    made.relist("5", [item("x", 3)])
    assert made.deleted(("ns", "x"), "u1") == {"a"}
    assert made.event("MODIFIED", item("x", 6)) == set()
    assert held(made) == 0
    made.wrote(item("x", 9, uid="u2"))
    assert made.event("DELETED", item("x", 8)) == set()
    assert held(made) == 9


def test_a_delete_of_a_predecessor_is_not_one_of_its_successor():
    made = store()
    made.relist("5", [item("x", 3)])
    made.event("ADDED", item("x", 7, uid="u2"))
    assert made.deleted(("ns", "x"), "u1") == set()
    assert made.event("DELETED", item("x", 6, uid="u1")) == set()
    assert made.event("MODIFIED", item("x", 6, uid="u1")) == set()
    assert held(made) == 7


def test_an_older_list_does_not_undo_our_own_writes():
    made = store()
    made.relist("5", [item("x", 3)])
    made.wrote(item("x", 8, spec=2))
    made.wrote(item("y", 9))
    assert made.relist("6", [item("x", 3)]) == set()
    assert (held(made), held(made, "y")) == (8, 9)


def test_a_restored_backup_voids_all_that_is_held():
    made = store()
    made.relist("500", [item("x", 300, spec=3), item("y", 400)])
    made.wrote(item("z", 600))
    touched = made.relist("20", [item("x", 10, spec=1)], reset=True)
    assert touched == {"a"}
    assert held(made) == 10
    assert len(made) == 1
    made.wrote(item("x", 25, spec=2))
    assert held(made) == 25


def test_a_newer_version_that_says_the_same_is_no_change():
    made = store()
    made.relist("5", [item("x", 3, spec=1)])
    assert made.event("MODIFIED", item("x", 6, spec=1)) == set()
    assert held(made) == 6  # preconditions need the newest


def test_who_leaves_a_group_matters_to_both():
    made = store()
    made.relist("5", [item("x", 3)])
    assert made.event("MODIFIED", item("x", 6, group="b")) == {"a", "b"}
    assert made.event("MODIFIED", item("x", 7, group="")) == {"b"}
    assert set(made.groups()) == set()
    assert held(made) == 7


def test_versions_that_are_no_numbers_follow_the_order_of_arrival():
    made = store()
    one = item("x", 0)
    one["metadata"]["resourceVersion"] = "abc"
    two = item("x", 0, spec=1)
    two["metadata"]["resourceVersion"] = "abd"
    made.relist("abc", [one])
    assert made.event("MODIFIED", two) == {"a"}


# ---- against a server, in every order -------------------------------------------------


@dataclass
class Server:
    """What an API server has, all that happened, and how far a watch has come."""

    version: int = 1
    objects: dict[str, Manifest] = field(default_factory=dict)
    history: list[tuple[int, str, Manifest]] = field(default_factory=list)
    uids: int = 0

    def write(self, name: str, value: int) -> Manifest:
        self.version += 1
        old = self.objects.get(name)
        if old is None:
            self.uids += 1
        uid = uid_of(old) if old else f"u{self.uids}"
        made = item(name, self.version, uid, group="ab"[value % 2], spec=value)
        self.objects[name] = made
        self.history.append((self.version, "MODIFIED" if old else "ADDED", made))
        return made

    def delete(self, name: str) -> Manifest | None:
        old = self.objects.pop(name, None)
        if old is None:
            return None
        self.version += 1
        gone = {**old, "metadata": {**old["metadata"], "resourceVersion": str(self.version)}}
        self.history.append((self.version, "DELETED", gone))
        return old

    def at(self, version: int) -> dict[str, Manifest]:
        """What existed as of a version."""
        found: dict[str, Manifest] = {}
        for happened, kind, one in self.history:
            if happened <= version:
                name = one["metadata"]["name"]
                if kind == "DELETED":
                    found.pop(name, None)
                else:
                    found[name] = one
        return found


NAMES = ("x", "y")
STEPS = st.one_of(
    st.tuples(st.just("theirs"), st.sampled_from(NAMES), st.integers(0, 3)),
    st.tuples(st.just("ours"), st.sampled_from(NAMES), st.integers(0, 3)),
    st.tuples(st.just("their delete"), st.sampled_from(NAMES), st.just(0)),
    st.tuples(st.just("our delete"), st.sampled_from(NAMES), st.just(0)),
    st.tuples(st.just("answer"), st.just(""), st.integers(0, 9)),
    st.tuples(st.just("watch"), st.just(""), st.integers(1, 3)),
    st.tuples(st.just("relist"), st.just(""), st.integers(0, 3)),
)


@given(st.lists(STEPS, max_size=60), st.booleans())
def test_the_store_is_never_behind_its_watch_and_ends_as_the_server_is(steps, packs):
    server, made = Server(), store(packs=packs)
    seen = server.version
    answers: list[tuple[str, Manifest]] = []
    made.relist(str(seen), [])
    for kind, name, number in steps:
        if kind == "theirs":
            server.write(name, number)
        elif kind == "ours":
            answers.append(("wrote", server.write(name, number)))
        elif kind == "their delete":
            server.delete(name)
        elif kind == "our delete":
            old = server.delete(name)
            if old is not None:
                answers.append(("deleted", old))
        elif kind == "answer" and answers:
            how, one = answers.pop(number % len(answers))
            if how == "wrote":
                made.wrote(one)
            else:
                made.deleted(name_of(one), uid_of(one))
        elif kind == "watch":
            for happened, event, one in server.history:
                if happened > seen and number:
                    made.event(event, one)
                    seen, number = happened, number - 1
        elif kind == "relist":  # after a gap, from a cache that may lag, but not behind us
            seen = max(seen, server.version - number)
            made.relist(str(seen), server.at(seen).values())
        check(server, made, seen)
    for happened, event, one in server.history:
        if happened > seen:
            made.event(event, one)
    for how, one in answers:
        if how == "wrote":
            made.wrote(one)
        else:
            made.deleted(name_of(one), uid_of(one))
    assert {name: made.get("ns", name) for name in NAMES} == {
        name: server.objects.get(name) for name in NAMES
    }
    check(server, made, server.version)


def check(server: Server, made: Store[str], seen: int) -> None:
    """Each name is as the server had it at some time not before `seen`; groups add up."""
    times = [seen, *(happened for happened, _, _ in server.history if happened > seen)]
    for name in NAMES:
        found = made.get("ns", name)
        assert any(found == server.at(time).get(name) for time in times), (name, found, times)
    grouped = [one for group in made.groups() for one in made.group(group)]
    assert sorted(map(name_of, grouped)) == sorted(map(name_of, made))
    for group in made.groups():
        versions = [one["metadata"]["resourceVersion"] for one in made.group(group)]
        assert made.versions(group) == versions
