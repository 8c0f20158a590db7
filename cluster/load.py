"""Reads cluster.yaml and says, for a person, what is wrong with it: file, line, key, remedy."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster import positions
from cluster.findings import rules
from cluster.positions import Document, FileError, Keys
from cluster.settings import Cluster, Problem, problems

DEFAULT_FILE = "group_data/cluster.yaml"


class ClusterFileError(ValueError):
    """cluster.yaml cannot be used. One line per problem: FILE:LINE: KEY: problem."""


def cluster_file() -> Path:
    """The file to read: $CLUSTER, or group_data/cluster.yaml."""
    return Path(os.environ.get("CLUSTER") or DEFAULT_FILE)


def load(path: Path | None = None) -> Cluster:
    """Read and check a cluster file (default: cluster_file()). Raises ClusterFileError."""
    path = path or cluster_file()
    try:
        document = positions.read(path)
    except FileError as problem:
        raise ClusterFileError(_line(path, problem.line, (), str(problem))) from None
    return check(document, path)


def check(document: Document, path: Path) -> Cluster:
    """Turn a document into a Cluster. Raises ClusterFileError."""
    try:
        cluster = Cluster.model_validate(document.values)
    except ValidationError as error:
        # A union reports once per member; the first line says it.
        found: dict[Keys, str] = {}
        for details in error.errors(include_url=False):
            keys, message = _describe(details, document)
            found.setdefault(keys, message)
        raise ClusterFileError(_lines(path, document, found)) from None
    found = {}
    for problem in (*problems(cluster), *_silenced(cluster)):
        found.setdefault(problem.keys, problem.message)
    if found:
        raise ClusterFileError(_lines(path, document, found))
    return cluster


def _silenced(cluster: Cluster) -> Iterator[Problem]:
    for finding in cluster.silence:
        if finding not in rules():
            close = difflib.get_close_matches(finding, rules(), n=1)
            hint = f' Did you mean "{close[0]}"?' if close else ""
            yield Problem(("silence", finding), f"no finding has this id.{hint}")


def _lines(path: Path, document: Document, found: dict[Keys, str]) -> str:
    rows = sorted((document.line(keys) or 0, keys, message) for keys, message in found.items())
    return "\n".join(_line(path, line or None, keys, message) for line, keys, message in rows)


def _line(path: Path, line: int | None, keys: Keys, message: str) -> str:
    place = f"{path}:{line}" if line else str(path)
    key = ".".join(str(key) for key in keys)
    return f"{place}: {key}: {message}" if key else f"{place}: {message}"


def _describe(details: ErrorDetails, document: Document) -> tuple[Keys, str]:
    keys = _keys(details["loc"], document)
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        return keys, _unknown_key(keys)
    if kind == "missing":
        return keys, f"is missing{_purpose(keys)}"
    if kind == "string_pattern_mismatch":
        return keys, f"{value!r:.60} is not a valid {_noun(keys)}{_purpose(keys)}"
    if details["loc"] and details["loc"][-1] == "[key]":
        return keys, f"{keys[-1]!r:.60} is not a valid {_noun(keys[:-1])}"
    if kind == "value_error":
        return keys, f"{_shown(value, keys)}{details['ctx']['error']}"
    if kind in {"dict_type", "model_type"}:
        section = _section((*keys, ""))
        known = f": {', '.join(sorted(section.model_fields))}" if section else ""
        if keys == ("hosts",):
            known = ", a name for each host"
        return keys, f"has to hold keys with values{known}{_purpose(keys)}"
    message = details["msg"]
    message = message[0].lower() + message[1:]
    if kind in {"string_type", "int_type", "float_type", "bool_type"} and value is None:
        return keys, f"has no value; {message}{_purpose(keys)}"
    return keys, f"{_shown(value, keys)}{message}{_purpose(keys)}"


def _shown(value: Any, keys: Keys) -> str:
    """The value, unless it is large or may be a secret."""
    is_private = "env" in keys or "secrets" in keys
    return "" if is_private or isinstance(value, (dict, list)) else f"{value!r:.60}: "


def _keys(location: tuple[int | str, ...], document: Document) -> Keys:
    """Drop what pydantic adds to a location: markers of keys and names of union members."""
    keys: Keys = ()
    for part in location:
        if part == "[key]":
            continue
        candidate = (*keys, part)
        if candidate in document.lines or part == location[-1] or not keys:
            keys = candidate
    return keys


def _section(keys: Keys) -> type[BaseModel] | None:
    """The model that holds the last of `keys`."""
    model: type[BaseModel] = Cluster
    for key in keys[:-1]:
        info = model.model_fields.get(str(key))
        if info is None:
            continue  # the name of a host, an index
        inner = [info.annotation, *get_args(info.annotation)]
        inner += [deeper for part in inner for deeper in get_args(part)]
        found = next((t for t in inner if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if found is None:
            return None
        model = found
    return model


def _unknown_key(keys: Keys) -> str:
    section = _section(keys)
    known = sorted(section.model_fields) if section else []
    close = difflib.get_close_matches(str(keys[-1]), known, n=1)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    return f"unknown key.{hint} Keys here: {', '.join(known)}"


def _purpose(keys: Keys) -> str:
    section = _section(keys)
    info = section.model_fields.get(str(keys[-1])) if section else None
    if info is None or not info.description:
        return ""
    return f" ({' '.join(info.description.split())})"


def _noun(keys: Keys) -> str:
    names = {
        "hcas": "RDMA device name",
        "hosts": "host name (letters, digits, '.', '-')",
        "via": "host name",
        "env": "variable name (letters, digits, '_')",
        "secrets": "variable name (letters, digits, '_')",
        "interface": "interface name",
        "flags": "flag (lower case, without the dashes)",
        "shm_size": "size such as 16g",
    }
    return next((names[str(key)] for key in reversed(keys) if str(key) in names), "value")
