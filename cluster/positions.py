"""YAML with positions: reads a file and remembers on which line every key stands.

Error messages about cluster.yaml name the line, and PyYAML's safe loader alone forgets it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.tables import Loader

Keys = tuple[str | int, ...]
"""A path into the document: ("hosts", "spark-1", "fabric", "address")."""

MAX_BYTES = 1024 * 1024
MAX_ENTRIES = 20_000


class FileError(ValueError):
    """The file cannot be read as YAML. `line` is 1-based, or None where none applies."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Document:
    """The values of a YAML file, and the line (1-based) of every key and list item in it."""

    values: Any
    lines: dict[Keys, int] = field(default_factory=dict)

    def line(self, keys: Keys) -> int | None:
        """Return the line of `keys`, or of the nearest enclosing key that the file has."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return self.lines.get(keys)


def read(path: Path) -> Document:
    """Read a YAML mapping.

    Raises FileError for everything that can be wrong with the file itself: absent, too large,
    not UTF-8, not YAML, tabs, duplicate keys, several documents, not a mapping, empty.
    """
    return parse(_text(path))


def parse(text: str) -> Document:
    """Parse a YAML mapping. Raises FileError."""
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise FileError("the file is empty; a cluster needs at least image, model and hosts")
        lines: dict[Keys, int] = {(): node.start_mark.line + 1}
        _walk(node, (), lines)
        values = loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        raise FileError(
            f"a character that YAML does not allow: {chr(error.character)!r}"
            if isinstance(error.character, int)
            else f"not readable: {error.reason}"
        ) from None
    except yaml.MarkedYAMLError as error:
        raise _syntax_problem(error, text) from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"not readable as YAML: {error}") from None
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else f"a single value ({values!r:.40})"
        raise FileError(f"the file holds {kind}; expected keys such as image, model, hosts", 1)
    return Document(values, lines)


def _text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise FileError(
                f"{size:,} bytes is too large for a cluster file (at most {MAX_BYTES:,})"
            )
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise FileError(
            "no such file; copy group_data/examples/two-sparks.yaml there, "
            "or name another file: CLUSTER=path"
        ) from None
    except UnicodeDecodeError as error:
        raise FileError(
            f"not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from None
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}") from None


def _syntax_problem(error: yaml.MarkedYAMLError, text: str) -> FileError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else None
    rows = text.splitlines()
    if line and line <= len(rows) and "\t" in rows[line - 1]:
        return FileError("a tab; YAML indents with spaces only", line)
    return FileError(f"not YAML: {error.problem or error.context}", line)


def _walk(node: yaml.Node, keys: Keys, lines: dict[Keys, int], depth: int = 0) -> None:
    # Aliases can make a small file a huge tree.
    if depth > 20 or len(lines) > MAX_ENTRIES:
        raise FileError("too deep or too large for a cluster file", node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise FileError("a key has to be plain text", line)
            key = str(key_node.value)
            if key in seen:
                raise FileError(f"key {key!r} stands here and on line {seen[key]}", line)
            seen[key] = line
            lines[(*keys, key)] = line
            _walk(value_node, (*keys, key), lines, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*keys, index)] = item.start_mark.line + 1
            _walk(item, (*keys, index), lines, depth + 1)
