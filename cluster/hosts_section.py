"""The hosts section of cluster.yaml as text: a new one, or new lines in a user's own file. Pure.

A file's lines are a person's work: only the fabric and gpus of a host that has changed are written
anew, with the comment that an earlier run has put over them; every other line stays as it is.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from cluster import positions
from cluster.discovery import Proposal

WIDTH = 100
MARK = "Discovered:"
"""Starts the comment over a fabric, so that another run can take it away again."""


class EditError(ValueError):
    """The file cannot be edited without a person."""


@dataclass(frozen=True)
class Entry:
    """A host to write. `ssh` is for one that the file does not have yet."""

    name: str
    proposal: Proposal
    ssh: dict[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class Edit:
    """A file with another hosts section. `kept` are the hosts whose lines were right already."""

    text: str
    kept: list[str]


def section(entries: list[Entry]) -> str:
    """Render a hosts section; the first host is the head."""
    wanted = _wanted({}, entries)
    lines = ["hosts:"]
    for entry in entries:
        lines += _host(entry, wanted[entry.name], 2)
    return "\n".join(lines) + "\n"


def new_file(entries: list[Entry]) -> str:
    """A cluster.yaml to complete: what only its owner knows is marked."""
    return (
        "# From tasks/discover.py. Set image and model; group_data/cluster.yaml shows every key.\n"
        "\n"
        "image: vllm/vllm-openai:v0.17.1 # yours here; executor ray needs Ray in it\n"
        "model: Qwen/Qwen2.5-7B-Instruct # yours here\n\n" + section(entries)
    )


def hosts_of(text: str) -> dict[str, Any]:
    """The hosts of a file as plain values, {} where it has none. Raises positions.FileError."""
    hosts = positions.parse(text).values.get("hosts")
    return {str(name): value for name, value in hosts.items()} if isinstance(hosts, dict) else {}


def edited(text: str, entries: list[Entry]) -> Edit:
    """Put the entries in place of a file's hosts.

    A host that the file knows keeps its other keys. The file's head stays head if it is among the
    entries; else the first entry is. Raises EditError, and positions.FileError where the file is
    not YAML.
    """
    before = hosts_of(text)
    wanted = _wanted(before, entries)
    kept = [entry.name for entry in entries if wanted[entry.name] == before.get(entry.name)]
    for attempt in (_with_lines_replaced, _with_section_replaced):
        after = attempt(text, before, wanted, entries)
        if after is not None and _is_right(text, after, wanted):
            return Edit(after, kept)
    raise EditError(
        "its hosts section cannot be edited line by line (anchors, aliases or one long line?); "
        "put the section in by hand"
    )


def diff(before: str, after: str, path: str) -> str:
    """A unified diff; "" where nothing differs."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), path, f"{path} (discovered)", lineterm=""
    )
    return "".join(f"{line}\n" for line in lines)


def comment(text: str, indent: int) -> list[str]:
    """A comment in lines of at most 100 characters."""
    start = " " * indent + "# "
    return textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False
    )


def _wanted(before: dict[str, Any], entries: list[Entry]) -> dict[str, dict[str, Any]]:
    """The hosts as values, as they should be."""
    olds = {entry.name: before.get(entry.name) for entry in entries}
    hosts: dict[str, dict[str, Any]] = {}
    for entry in entries:
        old = olds[entry.name]
        if isinstance(old, dict):
            hosts[entry.name] = {**old, **_changes(old, entry.proposal)}
        else:
            ssh = {"ssh": entry.ssh} if entry.ssh else {}
            hosts[entry.name] = {**ssh, **_changes({"gpus": None}, entry.proposal)}
    if not any(host.get("role") == "head" for host in hosts.values()):
        first = entries[0].name
        hosts[first] = {"role": "head", **hosts[first], **{"role": "head"}}
    return hosts


def _changes(old: dict[str, Any], proposal: Proposal) -> dict[str, Any]:
    """The keys of a host that are not as proposed."""
    changes: dict[str, Any] = {}
    fabric = old.get("fabric")
    if not isinstance(fabric, dict) or not _is_same(fabric, proposal):
        changes["fabric"] = _fabric(proposal)
    if proposal.gpus is not None and old.get("gpus", 1) != proposal.gpus:
        changes["gpus"] = proposal.gpus
    return changes


def _fabric(proposal: Proposal) -> dict[str, Any]:
    values: dict[str, Any] = {
        "address": str(proposal.address),
        "interface": proposal.interface,
    }
    return values if proposal.hcas is None else {**values, "hcas": proposal.hcas}


def _is_same(fabric: dict[str, Any], proposal: Proposal) -> bool:
    address = str(fabric.get("address"))
    if "/" not in address:
        address += "/24"
    hcas, wanted = fabric.get("hcas"), proposal.hcas
    same_hcas = sorted(map(str, hcas or [])) == sorted(wanted or [])
    if wanted == []:  # absent is something else: NCCL looks for itself
        same_hcas = hcas == []
    is_same = address == str(proposal.address) and fabric.get("interface") == proposal.interface
    return is_same and same_hcas


def _host(entry: Entry, values: dict[str, Any], indent: int) -> list[str]:
    """A host's lines, all of them new."""
    start = " " * (indent + 2)
    lines = [f"{' ' * indent}{_flow(entry.name)}:"]
    for key, value in values.items():
        if key not in {"fabric", "gpus"}:
            lines += _key(key, value, indent + 2)
    lines += _fabric_lines(entry.proposal, indent + 2)
    if "gpus" in values and values["gpus"] != entry.proposal.gpus:
        return [*lines, f"{start}gpus: {_flow(values['gpus'])}"]
    if "gpus" in values or entry.proposal.gpus is None:
        lines += _gpus(entry.proposal, indent + 2)
    return lines


def _key(key: str, value: Any, indent: int) -> list[str]:
    """A key with its value: on one line, or a mapping that is too long for one with a line each."""
    line = f"{' ' * indent}{_flow(key)}: {_flow(value)}"
    if len(line) <= WIDTH or not isinstance(value, dict):
        return [line]
    inner = [line for item in value.items() for line in _key(*item, indent + 2)]
    return [f"{' ' * indent}{_flow(key)}:", *inner]


def _fabric_lines(proposal: Proposal, indent: int) -> list[str]:
    start = " " * indent
    lines: list[str] = []
    warnings = [f"WARNING: {text}" for text in proposal.warnings]
    for text in (f"{MARK} {proposal.why[0]}", *warnings, *proposal.why[1:]):
        lines += comment(text, indent)
    lines += [
        f"{start}fabric:",
        f"{start}  address: {proposal.address}",
        f"{start}  interface: {_flow(proposal.interface)}",
    ]
    for text in proposal.why_hcas:
        lines += comment(text, indent + 2)
    if proposal.hcas is not None:
        lines.append(f"{start}  hcas: {_flow(proposal.hcas)}")
    return lines


def _gpus(proposal: Proposal, indent: int) -> list[str]:
    if proposal.gpus is None:
        return comment(proposal.why_gpus, indent)
    return [f"{' ' * indent}gpus: {proposal.gpus} # {proposal.why_gpus}"[:WIDTH]]


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _is_right(before: str, after: str, wanted: dict[str, dict[str, Any]]) -> bool:
    """Whether an edit has changed the hosts as wanted and nothing else."""
    try:
        old, new = positions.parse(before).values, positions.parse(after).values
    except positions.FileError:
        return False
    new_hosts = {str(name): value for name, value in (new.pop("hosts", None) or {}).items()}
    old.pop("hosts", None)
    return bool(old == new and new_hosts == wanted)


@dataclass(frozen=True)
class _Block:
    """A key of a mapping in block style: its lines [start, end), 0-based, and its indent."""

    start: int
    end: int
    indent: int
    value: yaml.Node

    @property
    def is_block(self) -> bool:
        """Whether the value is a mapping with a key per line."""
        return isinstance(self.value, yaml.MappingNode) and not self.value.flow_style


def _blocks(mapping: yaml.MappingNode) -> dict[str, _Block]:
    return {
        str(key.value): _Block(
            key.start_mark.line, _last_line(value) + 1, key.start_mark.column, value
        )
        for key, value in mapping.value
    }


def _last_line(node: yaml.Node) -> int:
    """The last line of a value, without the comments behind it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1])
    end: yaml.Mark = node.end_mark
    # A block scalar ends at the start of what follows it.
    is_over = end.column == 0 and end.line > node.start_mark.line
    return int(end.line) - (1 if is_over else 0)


def _hosts_block(text: str) -> _Block | None:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        return None
    blocks = _blocks(root)
    hosts = blocks.get("hosts")
    if hosts is None:
        return None
    # Not by its values: an alias stands elsewhere. Comments at the margin belong to what follows.
    lines = text.splitlines()
    end = min((each.start for each in blocks.values() if each.start > hosts.start), default=None)
    end = len(lines) if end is None else end
    while end > hosts.start + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1
    return replace(hosts, end=end)


def _with_lines_replaced(
    text: str, before: dict[str, Any], wanted: dict[str, dict[str, Any]], entries: list[Entry]
) -> str | None:
    """Write only the lines that have to change; None where the section is not in block style."""
    lines = text.splitlines()
    hosts = _hosts_block(text)
    if hosts is None or not hosts.is_block:
        return None
    assert isinstance(hosts.value, yaml.MappingNode)  # noqa: S101 -- is_block
    blocks = _blocks(hosts.value)
    indent = next(iter(blocks.values())).indent
    by_name = {entry.name: entry for entry in entries}
    fresh = [entry for entry in entries if entry.name not in blocks]
    result = lines[: hosts.start + 1]
    starts = [_lead(lines, block.start, hosts.start + 1) for block in blocks.values()]
    result += lines[hosts.start + 1 : starts[0]]
    for (name, block), start, stop in zip(
        blocks.items(), starts, [*starts[1:], hosts.end], strict=True
    ):
        if name not in by_name:
            continue
        own = lines[start:stop]
        if wanted[name] == before[name]:
            result += own
        elif block.is_block:
            found = _host_lines(own, block, start, before[name], wanted[name], by_name[name])
            result += found
        else:
            result += lines[start : block.start]
            result += _host(by_name[name], wanted[name], indent)
    for entry in fresh:
        result += _host(entry, wanted[entry.name], indent)
    return "\n".join([*result, *lines[hosts.end :]]) + "\n"


def _lead(lines: list[str], start: int, floor: int) -> int:
    """The first of the comment lines right above a key that stand at its own indent."""
    indent = len(lines[start]) - len(lines[start].lstrip())
    while start > floor:
        line = lines[start - 1]
        if not line.strip().startswith("#") or len(line) - len(line.lstrip()) != indent:
            break
        start -= 1
    return start


def _host_lines(
    own: list[str],
    block: _Block,
    offset: int,
    values: dict[str, Any],
    wanted: dict[str, Any],
    entry: Entry,
) -> list[str]:
    """A host's lines with those of its fabric and gpus replaced. `own` starts at line `offset`."""
    assert isinstance(block.value, yaml.MappingNode)  # noqa: S101 -- is_block
    keys = _blocks(block.value)
    if not keys:
        return own
    indent = next(iter(keys.values())).indent
    replacements: list[tuple[int, int, list[str]]] = []
    if values.get("fabric") != wanted["fabric"]:
        place = keys.get("fabric")
        position = (place.start, place.end) if place else (block.end, block.end)
        start = position[0] - offset
        if place:
            lead = range(_lead(own, start, 0), start)
            marked = (line for line in lead if own[line].strip().startswith(f"# {MARK}"))
            start = next(marked, start)
        replacements.append((start, position[1] - offset, _fabric_lines(entry.proposal, indent)))
    if values.get("gpus") != wanted.get("gpus"):
        place = keys.get("gpus") or keys.get("fabric")
        is_there = "gpus" in keys
        end = (place.end if place else block.end) - offset
        start = place.start - offset if is_there and place else end
        replacements.append((start, end, _gpus(entry.proposal, indent)))
    if values.get("role") != wanted.get("role"):
        place = keys.get("role")
        start = place.start - offset if place else block.start + 1 - offset
        end = place.end - offset if place else start
        replacements.append((start, end, [f"{' ' * indent}role: head"]))
    result = list(own)
    for start, end, lines in sorted(replacements, key=lambda each: each[:2], reverse=True):
        result[start:end] = lines
    return result


def _with_section_replaced(
    text: str,
    before: dict[str, Any],  # noqa: ARG001 -- as _with_lines_replaced
    wanted: dict[str, dict[str, Any]],
    entries: list[Entry],
) -> str | None:
    """Write the whole section anew, or behind a file that has none."""
    rendered = ["hosts:"]
    for entry in entries:
        rendered += _host(entry, wanted[entry.name], 2)
    lines = text.splitlines()
    hosts = _hosts_block(text)
    if hosts is None:
        return "\n".join([*lines, "", *rendered]) + "\n"
    return "\n".join([*lines[: hosts.start], *rendered, *lines[hosts.end :]]) + "\n"


def explained(entry: Entry) -> Iterator[str]:
    """Why a host's lines are right as they are."""
    yield from (*entry.proposal.why, *entry.proposal.why_hcas)
    if entry.proposal.gpus is None:
        yield entry.proposal.why_gpus
