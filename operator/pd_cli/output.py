"""What commands have in common for programs: `-o json`, and what their exit statuses mean."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

OK, FAILED, BAD_INPUT = 0, 1, 2
JSON = "json"
_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Form(click.Choice[str]):
    """text or json; `table` is what `status` called text once."""

    def __init__(self) -> None:
        super().__init__(["text", JSON])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert("text" if value == "table" else value, param, ctx)


def option(command: _Command) -> _Command:
    """-o, --output: the same for every command that has an answer to print."""
    add = click.option(
        "-o", "--output", type=_Form(), default="text", show_default=True,
        help="For people, or for programs.",
    )  # fmt: skip
    return add(command)


def document(value: object) -> None:
    """Prints what `-o json` asks for."""
    click.echo(json.dumps(value, indent=2))


_BAD_FLAG = {BAD_INPUT: "a flag is wrong"}
_ENDED = "after a signal, with everything ended"
_FOREGROUND = {
    OK: _ENDED,
    FAILED: "it can't run: the name or the port is taken, the state can't be kept",
}
EXITS: dict[str, dict[int, str]] = {
    "pdcluster serve": {
        **_FOREGROUND,
        BAD_INPUT: "the model isn't there or is refused (also for what a flag asks of it), "
        "this machine can't run it, or a flag is wrong",
    },
    "pdcluster up": {
        **_FOREGROUND,
        BAD_INPUT: "the file is wrong, this machine can't run it, or a flag is wrong",
    },
    "pdcluster status": {
        OK: "also when nothing runs and no NAME is given",
        FAILED: "no PDCluster NAME is running",
        **_BAD_FLAG,
    },
    "pdcluster top": {
        OK: "looked, or ended by Ctrl-C",
        FAILED: "no such PDCluster, or no router answers",
        **_BAD_FLAG,
    },
    "pdcluster requests": {
        OK: "shown",
        FAILED: "no such PDCluster, no router answers, or none knows of it",
        **_BAD_FLAG,
    },
    "pdcluster validate": {
        OK: "the file is right; this machine may still be unable to run it",
        BAD_INPUT: "the file is wrong, or a flag is",
    },
    "pdcluster estimate": {OK: "estimated", BAD_INPUT: "the model is unknown, or a flag is wrong"},
    "pdcluster explain": {
        OK: "explained; with --replay, all was decided as recorded",
        FAILED: "no decision about NAME; with --replay, some were decided otherwise, or none",
        BAD_INPUT: "the recording is none, or a flag is wrong",
    },
    "pdcluster advise": {OK: "whatever the advice", BAD_INPUT: "the trace or a flag is wrong"},
    "pdcluster simulate": {OK: "simulated", BAD_INPUT: "the trace, the cluster or a flag is wrong"},
    "pdcluster profile": {
        OK: "measured and written",
        FAILED: "nothing that can be measured runs, or an answer took too long",
        **_BAD_FLAG,
    },
    "pdcluster down": {
        OK: "it is gone; also when nothing runs and no NAME is given",
        FAILED: "no PDCluster NAME is running, several are and none is named, or it doesn't end",
        **_BAD_FLAG,
    },
    "pdcluster logs": {
        OK: "printed",
        FAILED: "no pod POD is running or has left a log",
        **_BAD_FLAG,
    },
    "pdcluster completion": {OK: "printed", BAD_INPUT: "another shell, or a flag is wrong"},
    "pdcluster quickstart": {
        OK: "answered",
        FAILED: "it can't run, isn't ready in time, or gives no answer",
        BAD_INPUT: "the file is wrong, this machine can't run it, or a flag is wrong",
    },
    "kubectl pd status": {OK: "shown", FAILED: "kubectl failed, with its words", **_BAD_FLAG},
    "kubectl pd top": {
        OK: "looked, or ended by Ctrl-C",
        FAILED: "kubectl failed, no router is ready, or none answers",
        **_BAD_FLAG,
    },
    "kubectl pd requests": {
        OK: "shown",
        FAILED: "kubectl failed, no router is ready, none answers, or none knows of it",
        **_BAD_FLAG,
    },
    "kubectl pd open": {
        OK: "ended by Ctrl-C",
        FAILED: "kubectl failed, or no router is ready",
        **_BAD_FLAG,
    },
    "kubectl pd explain": {
        OK: "explained",
        FAILED: "kubectl failed, no operator is found, or it has no decision about NAME",
        **_BAD_FLAG,
    },
}
"""Command -> status -> when. docs/reference/commands.md is made of it; tests cause each."""
