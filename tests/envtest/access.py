"""What the operator may do, as tests grant it."""

from pathlib import Path
from typing import Any

import yaml

import pd_operator

RBAC = Path(pd_operator.__file__).parent / "rbac.yaml"


def rules(*parts: str) -> list[dict[str, Any]]:
    """The rules of these parts of rbac.yaml."""
    document = yaml.safe_load(RBAC.read_text())
    return [rule for part in parts for rule in document[part]]
