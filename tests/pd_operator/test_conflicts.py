"""Names that are taken and objects that are refused, told in the status; and whose an object is."""

from typing import Any

from pd_operator import conflicts
from pd_operator.conflicts import Refused, Taken
from pd_operator.observed import Ref

NOW, BEFORE = "2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z"
SERVICE = Ref("Service", "chat-router")


def owned(uid: str, kind: str = "PDCluster", controller: bool = True) -> dict[str, Any]:
    owner = {"kind": kind, "uid": uid, "controller": controller}
    return {"metadata": {"ownerReferences": [owner]}}


def status(ready: str, since: str) -> dict[str, Any]:
    return {
        "conditions": [
            {
                "type": kind,
                "status": ready,
                "reason": "R",
                "message": "",
                "lastTransitionTime": since,
            }
            for kind in ("Ready", "Available", "Progressing")
        ]
    }


def test_whose_it_is():
    assert conflicts.is_owned(owned("u1"), "u1")
    assert not conflicts.is_owned(owned("u2"), "u1")
    assert not conflicts.is_owned(owned("u1", controller=False), "u1")
    assert not conflicts.is_owned({"metadata": {}}, "u1")
    assert conflicts.is_pdclusters(owned("u2"))
    assert not conflicts.is_pdclusters(owned("u2", kind="Deployment"))
    assert not conflicts.is_pdclusters({"metadata": {"ownerReferences": None}})


def test_a_status_without_obstacles_is_as_it_was():
    assert conflicts.with_obstacles(status("True", BEFORE), [], {}, NOW) == status("True", BEFORE)


def test_what_is_in_the_way_is_why_it_is_not_ready():
    found = [Taken(SERVICE, False), Refused(Ref("StatefulSet", "s"), "quota exceeded")]
    made = conflicts.with_obstacles(status("True", BEFORE), found, status("True", BEFORE), NOW)
    by_type = {one["type"]: one for one in made["conditions"]}
    assert by_type["Available"] == status("True", BEFORE)["conditions"][1]
    for kind in ("Ready", "Progressing"):
        one = by_type[kind]
        assert (one["status"], one["reason"], one["lastTransitionTime"]) == (
            "False",
            "NameTaken",
            NOW,
        )
        assert "Service chat-router exists and isn't ours" in one["message"]
        assert "StatefulSet s is refused: quota exceeded" in one["message"]
    again = conflicts.with_obstacles(status("True", BEFORE), found, made, "2026-01-03T00:00:00Z")
    assert again == made  # the time of transition stays


def test_a_predecessors_object_is_told_as_such():
    assert "of an earlier PDCluster of this name" in str(Taken(SERVICE, True))
