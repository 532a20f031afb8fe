"""JSON as reshard reads and writes it: UTF-8, no duplicate keys, one canonical form to hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from reshard.errors import ReshardError, quoted


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return result


def _encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def parse_object(
    raw: bytes, what: str, error: type[ReshardError], *, duplicate: str = "duplicate key"
) -> dict[str, Any]:
    """Parse `raw` as one JSON object.

    Raises `error`, its message starting with `what`, for invalid UTF-8, invalid JSON (with its
    position), a duplicate key at any depth (`duplicate` says what a key is), nesting too deep to
    parse, or another value at the top.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{what} is not valid UTF-8 (byte {problem.start})") from None
    del raw
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKey as problem:
        raise error(f"{what}: {duplicate} {quoted(str(problem))}") from None
    except json.JSONDecodeError as problem:
        where = f"line {problem.lineno}, column {problem.colno}"
        raise error(f"{what} is not valid JSON: {problem.msg} ({where})") from None
    except RecursionError:
        raise error(f"{what} is not valid JSON: nested too deeply") from None
    except ValueError as problem:  # a number with more digits than Python converts
        raise error(f"{what} is not valid JSON: {problem}") from None
    if "\\u" in text and not _encodable(value):
        raise error(f"{what}: bad escape in name or text (lone surrogate)")
    if not isinstance(value, dict):
        raise error(f"{what} must be an object, found {type(value).__name__}")
    return value


def canonical(value: Any) -> bytes:
    """`value` as canonical JSON: sorted keys, no blanks, UTF-8, unescaped."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8")


def digest(value: Any) -> str:
    """sha256, in hexadecimal, over the canonical JSON of `value`."""
    return hashlib.sha256(canonical(value)).hexdigest()


def pretty(value: Any) -> bytes:
    """`value` as indented JSON in its own key order: the form of files that people read."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def decode(kind: Any, value: Any, where: str, error: type[ReshardError]) -> Any:
    """Turn parsed JSON into `kind`: a dataclass, int, str, bool, `X | None`, tuple or Mapping.

    Unknown fields, missing ones and values of another type raise `error`, naming the place by
    `where`.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        if value is None and type(None) in arguments:
            return None
        return decode(arguments[0], value, where, error)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        if value.keys() != hints.keys():
            names = ", ".join(quoted(name) for name in sorted(value.keys() ^ hints.keys()))
            raise error(f"{where}: missing or unknown fields: {names}")
        return kind(**{k: decode(hints[k], v, f"{where}.{k}", error) for k, v in value.items()})
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise error(f"{where}: {len(arguments)} values expected, found {len(value)}")
        return tuple(decode(arguments[0], v, f"{where}[{i}]", error) for i, v in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {k: decode(arguments[1], v, f"{where}.{quoted(k)}", error) for k, v in value.items()}
    if kind in (int, str, bool) and type(value) is kind and (kind is not int or 0 <= value < 2**63):
        return value
    raise error(f"{where}: {quoted(repr(value))} is not what belongs here")
