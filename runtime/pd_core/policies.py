"""The names of the policies by which a router chooses workers: in the CRD and in flags."""

from typing import Literal, get_args

PolicyName = Literal[
    "cost",
    "random",
    "round_robin",
    "least_load",
    "least_outstanding",
    "prompt_length",
    "prefix",
    "session",
]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
