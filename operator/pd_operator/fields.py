"""PURE. Reads a document field by field and collects everything that is wrong with it.

A `Node` is one mapping of the document. Each read checks the type and the bounds,
records what is wrong, and goes on with the default, so that one pass finds every
mistake. `close()` refuses what nobody has read: an unknown field is a typo.
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

NAME_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
OBJECT_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_MAX_LABEL_VALUE = 63
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h))+")
_SECONDS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(Ki|Mi|Gi|Ti|Pi|Ei|m|k|M|G|T|P|E|)")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = ("m", "", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True, slots=True)
class FieldError:
    """One thing that is wrong: where, what, and what to write instead."""

    path: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.remedy}"


def parse_duration(text: str) -> float | None:
    """Seconds of "500ms", "30s", "1m30s"; None when it is no duration."""
    if not _DURATION.fullmatch(text):
        return None
    parts = _DURATION_PART.findall(text)
    return float(sum(Fraction(number) * _SECONDS[unit] for number, unit in parts))


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads back, to a millisecond."""
    for unit in ("h", "m", "s"):
        count = seconds / float(_SECONDS[unit])
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{round(seconds * 1000)}ms"


def canonical_quantity(text: str) -> str | None:
    """A Kubernetes quantity as the API server would print it; None when it is none.

    The API server rewrites quantities ("1024Mi" to "1Gi"), so what we apply has to be
    canonical, or what we observe never equals it.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    value = _value(match)
    if match[2] in _BINARY[1:]:
        return _largest_unit(value, 1024, _BINARY)
    return _largest_unit(value * 1000, 1000, _DECIMAL)


def quantity_bytes(text: str) -> int:
    """A canonical quantity as a whole number, rounded up; 0 for "".

    ValueError for anything else.
    """
    if not text:
        return 0
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    return math.ceil(_value(match))


def _value(match: re.Match[str]) -> Fraction:
    """What a text that _QUANTITY matches stands for."""
    number, suffix = Fraction(match[1]), match[2]
    if suffix in _BINARY[1:]:
        return number * 1024 ** _BINARY.index(suffix)
    return number * Fraction(1000) ** (_DECIMAL.index(suffix) - _DECIMAL.index(""))


def _largest_unit(value: Fraction, step: int, units: Sequence[str]) -> str:
    """The value as a whole number of the largest unit that allows it, rounded up."""
    whole = math.ceil(value)
    unit = 0
    while whole and whole % step == 0 and unit + 1 < len(units):
        whole //= step
        unit += 1
    return f"{whole}{units[unit]}" if whole else "0"


def show(value: object) -> str:
    """A value of the document as messages quote it."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"' if len(value) <= 60 else f'"{value[:57]}..."'
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence):
        return "a list"
    return str(value)


_QUANTITY_REMEDY = 'write a quantity, such as 2, "500m" or "8Gi"'


def _quantity(value: object) -> str | None:
    """Numbers with a fraction must be text, as in Kubernetes."""
    plain = isinstance(value, str | int) and not isinstance(value, bool)
    return canonical_quantity(str(value)) if plain else None


class Node:
    """One mapping of the document, and where it is in it."""

    def __init__(self, value: object, path: str, errors: list[FieldError]) -> None:
        self.path = path
        self.errors = errors
        self._known: set[str] = set()
        self._fields: dict[str, object] = {}
        self.is_mapping = isinstance(value, Mapping)
        if isinstance(value, Mapping):
            self._fields = {str(key): item for key, item in value.items()}
        else:
            remedy = "write {} for the defaults" if value is None else "write a mapping"
            self.error("", f"is {show(value)}, not a mapping", remedy)

    def at(self, name: str) -> str:
        """The path of one of its fields."""
        if not name:
            return self.path or "the document"
        return f"{self.path}.{name}" if self.path else name

    def error(self, name: str, problem: str, remedy: str) -> None:
        self.errors.append(FieldError(self.at(name), problem, remedy))

    def has(self, name: str) -> bool:
        """Whether the field is there. Who asks for a name makes it a known one."""
        self._known.add(name)
        return name in self._fields

    def raw(self, name: str) -> object:
        """The value as it stands; None when absent."""
        self._known.add(name)
        return self._fields.get(name)

    def child(self, name: str) -> "Node | None":
        """A nested mapping; None when the field is absent."""
        if not self.has(name):
            return None
        return Node(self.raw(name), self.at(name), self.errors)

    def child_or_empty(self, name: str) -> "Node":
        """A nested mapping; one without fields when absent, so that defaults apply."""
        return self.child(name) or Node({}, self.at(name), self.errors)

    def children(self, name: str) -> list["Node"]:
        """A list of mappings; empty when the field is absent."""
        value = self.raw(name)
        if not self.has(name):
            return []
        if not isinstance(value, list):
            self.error(name, f"is {show(value)}, not a list", "write a list of mappings")
            return []
        return [Node(item, f"{self.at(name)}[{i}]", self.errors) for i, item in enumerate(value)]

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number within bounds, both included."""
        if not self.has(name):
            return default
        value = self.raw(name)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        remedy = f"write a whole number from {low} to {high}"
        if isinstance(value, str) and value.isdigit():
            remedy += ", without quotes"
        self.error(name, f"is {show(value)}", remedy)
        return default

    def number(self, name: str, default: float, above: float, below: float) -> float:
        """A finite number strictly between two bounds."""
        if not self.has(name):
            return default
        value = self.raw(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and above < value < below:
            return float(value)
        self.error(name, f"is {show(value)}", f"write a number above {above:g} and below {below:g}")
        return default

    def share(self, name: str, default: float) -> float:
        """Above 0, and 1 at most."""
        if not self.has(name):
            return default
        value = self.raw(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1:
            return float(value)
        self.error(name, f"is {show(value)}", "write a number above 0 and at most 1")
        return default

    def duration(self, name: str, default_s: float, low_s: float, high_s: float) -> float:
        """Seconds, from a text such as "500ms", "30s" or "5m"."""
        if not self.has(name):
            return default_s
        value = self.raw(name)
        seconds = parse_duration(value) if isinstance(value, str) else None
        bounds = f"from {format_duration(low_s)} to {format_duration(high_s)}"
        if seconds is None:
            remedy = f'write a duration {bounds}, such as "500ms", "30s" or "5m"'
            self.error(name, f"is {show(value)}, not a duration", remedy)
            return default_s
        if not low_s <= seconds <= high_s:
            self.error(name, f"is {show(value)}", f"write a duration {bounds}")
            return default_s
        return seconds

    def choice(self, name: str, default: str, options: Sequence[str]) -> str:
        """One of a few words."""
        if not self.has(name):
            return default
        value = self.raw(name)
        if isinstance(value, str) and value in options:
            return value
        self.error(name, f"is {show(value)}", f"write one of {', '.join(options)}")
        return default

    def text(
        self, name: str, pattern: re.Pattern[str], describe: str, max_length: int = 253
    ) -> str:
        """A text that a pattern matches as a whole; "" when absent or wrong."""
        if not self.has(name):
            return ""
        value = self.raw(name)
        if not isinstance(value, str):
            self.error(name, f"is {show(value)}, not text", f"write {describe}")
            return ""
        if len(value) > max_length:
            problem = f"is {show(value)}, {len(value)} characters long"
            self.error(name, problem, f"write at most {max_length} characters")
            return ""
        if not pattern.fullmatch(value):
            self.error(name, f"is {show(value)}", f"write {describe}")
            return ""
        return value

    def required(self, name: str, example: str) -> None:
        """Records that a field without a default is missing."""
        if not self.has(name) and self.is_mapping:
            self.error(name, "is missing", f"write {example}")

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        if not self.has(name):
            return default
        value = self.raw(name)
        if isinstance(value, bool):
            return value
        self.error(name, f"is {show(value)}", "write true or false, without quotes")
        return default

    def texts(self, name: str) -> dict[str, str]:
        """A mapping from keys such as example.com/team to text: annotations."""
        node = self.child(name)
        if node is None:
            return {}
        for key, value in node._fields.items():
            if not LABEL_KEY.fullmatch(key):
                node.error(key, "is no key", "write keys such as team or example.com/team")
            if not isinstance(value, str):
                node.error(key, f"is {show(value)}, not text", "put the value in quotes")
        return {key: value for key, value in node._fields.items() if isinstance(value, str)}

    def labels(self, name: str) -> dict[str, str]:
        """Labels: their values are bounded and of few characters."""
        found = self.texts(name)
        for key, value in found.items():
            path = f"{name}.{key}"
            if len(value) > _MAX_LABEL_VALUE:
                problem = f"is {show(value)}, {len(value)} characters long"
                self.error(path, problem, f"write at most {_MAX_LABEL_VALUE} characters")
            elif value and not LABEL_VALUE.fullmatch(value):
                remedy = "write letters, digits and any of . _ - between them"
                self.error(path, f"is {show(value)}", remedy)
        return found

    def quantities(self, name: str) -> dict[str, str]:
        """A mapping from resource name to a canonical quantity."""
        node = self.child(name)
        if node is None:
            return {}
        result = {}
        for key, value in node._fields.items():
            quantity = _quantity(value)
            if quantity is None:
                node.error(key, f"is {show(value)}, not a quantity", _QUANTITY_REMEDY)
            else:
                result[key] = quantity
        return result

    def quantity(self, name: str) -> str:
        """A canonical quantity; "" when absent or wrong."""
        if not self.has(name):
            return ""
        value = self.raw(name)
        quantity = _quantity(value)
        if quantity is None:
            self.error(name, f"is {show(value)}, not a quantity", _QUANTITY_REMEDY)
        return quantity or ""

    def not_yet(self, *names: str) -> None:
        """Refuses fields that a later version will know: ignoring them would be a lie."""
        for name in names:
            if self.has(name):
                self.raw(name)
                self.error(name, "is not supported yet", "leave it out")

    def close(self) -> None:
        """Refuses the fields that nobody asked for."""
        for name in self._fields:
            if name not in self._known:
                close = difflib.get_close_matches(name, sorted(self._known), n=1)
                known = f"known here: {', '.join(sorted(self._known))}"
                remedy = f"did you mean {close[0]}?" if close else known
                self.error(name, "is not a known field", remedy)
