"""What the hosts keep: which of it the cluster uses, a table of it, and what may be deleted. Pure.

The hosts' own part is remote/stored.py: it says what is there, and looks again before it deletes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

HEADER = ("host", "kind", "name", "size", "last use", "in use")
UNUSED = "unused"
"""The confirmation that means everything that is not in use."""
SHORT = 12
"""Letters of a commit or digest that are shown."""

Kind = Literal["image", "snapshot", "model", "leftover"]


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Image(_Answer):
    """An image in a host's Docker."""

    id: str
    references: list[str]
    foreign: list[str] = Field(default_factory=list)
    """References of repositories that are not this cluster's."""
    bytes: int
    """Its own and shared layers; deleting it frees at most so much."""
    created: float | None = None
    """Seconds since 1970. Docker does not know when an image was last used."""
    used_by: list[str]
    """Containers, stopped ones too."""


class Snapshot(_Answer):
    """One commit of a model in a Hugging Face cache."""

    commit: str
    refs: list[str]
    bytes: int
    """On the disk, of files that no other snapshot has."""
    last_use: float | None
    is_open: bool


class Model(_Answer):
    """A model on a host: in a Hugging Face cache, or a directory of its own."""

    kind: Literal["cache", "directory"]
    name: str
    path: str
    bytes: int
    last_use: float | None
    has_atime: bool
    is_open: bool
    snapshots: list[Snapshot]


class Leftover(_Answer):
    """The beginning of a file whose transfer was interrupted."""

    path: str
    bytes: int
    last_use: float
    is_open: bool


class Stored(_Answer):
    """The answer of remote/stored.py, role list."""

    docker_error: str | None = None
    images: list[Image] = Field(default_factory=list)
    models: list[Model] = Field(default_factory=list)
    leftovers: list[Leftover] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)


class Deletion(_Answer):
    """Something that is gone."""

    kind: str
    name: str
    freed: int
    """Bytes."""


class Refusal(_Answer):
    """Something that a host did not delete."""

    kind: str
    name: str
    why: str


class Deleted(_Answer):
    """The answer of remote/stored.py, role delete."""

    deleted: list[Deletion]
    refused: list[Refusal]
    freed: int
    """Bytes."""


@dataclass(frozen=True)
class Current:
    """What the cluster is made of now."""

    image: str
    """The reference in cluster.yaml."""
    model: str
    """The name on the hub, or a directory."""
    image_ids: frozenset[str] = frozenset()
    """Docker's ids and the digest of it, as far as they are known."""
    commit: str | None = None
    """The commit that is served, where it is known."""
    revision: str = "main"
    """The branch or tag that is served, where no commit is known."""


@dataclass(frozen=True)
class Entry:
    """One thing on one host that could be deleted alone."""

    host: str
    kind: Kind
    name: str
    aliases: frozenset[str]
    """Further names that a person may write for it."""
    bytes: int
    last_use: float | None
    """Seconds since 1970; None where nobody knows."""
    is_estimate: bool
    """last_use is when it was written or made, not when it was last read."""
    in_use: str
    """Why it stays; "" where it may go."""
    key: tuple[tuple[str, str], ...]
    """How remote/stored.py knows it."""

    def argument(self) -> dict[str, str]:
        """For the entries of remote/stored.py, role delete."""
        return {"kind": self.kind, "name": self.name, **dict(self.key)}


@dataclass(frozen=True)
class Choice:
    """What a confirmation means."""

    entries: list[Entry]
    """To be deleted."""
    problems: list[str]
    """Names that mean nothing, or something that is in use. With any, nothing should be deleted."""

    @property
    def bytes(self) -> int:
        """At most so many are freed."""
        return sum(entry.bytes for entry in self.entries)

    def arguments(self, host: str) -> list[dict[str, str]]:
        """The entries of remote/stored.py on a host, role delete."""
        return [entry.argument() for entry in self.entries if entry.host == host]


def entries(stored: Mapping[str, Stored], current: Current) -> list[Entry]:
    """All that the hosts keep, by host, the largest first."""
    found: list[Entry] = []
    for host, kept in stored.items():
        rows = [_image(host, image, current) for image in kept.images]
        for model in kept.models:
            rows += _model(host, model, current)
        rows += [_leftover(host, leftover) for leftover in kept.leftovers]
        found += sorted(rows, key=lambda entry: (-entry.bytes, entry.name))
    return found


def problems(stored: Mapping[str, Stored]) -> list[str]:
    """What could not be looked at."""
    found = []
    for host, kept in stored.items():
        if kept.docker_error:
            found.append(f"{host}: its images are unknown: {kept.docker_error}")
        found += [f"{host}: {problem}" for problem in kept.problems]
    return found


def table_rows(found: list[Entry], now: float) -> list[tuple[str, ...]]:
    """Rows below HEADER. now: seconds since 1970."""
    rows: list[tuple[str, ...]] = []
    for entry in found:
        last = age(entry.last_use, now)
        if entry.is_estimate and entry.last_use is not None:
            last = f"written {last}" if entry.kind != "image" else f"built {last}"
        size = size_text(entry.bytes)
        rows.append((entry.host, entry.kind, entry.name, size, last, entry.in_use or "no"))
    return rows


def chosen(found: list[Entry], confirmation: str) -> Choice:
    """What `--data delete=NAME[,NAME]` or `--data delete=unused` deletes, on all hosts.

    A name is one of the table, the name of a model (all its snapshots), or a further reference of
    an image. What is in use is never among it.
    """
    picked: dict[int, Entry] = {}
    wrong: list[str] = []
    words = [word.strip() for word in confirmation.split(",") if word.strip()]
    for word in words:
        if word == UNUSED:
            fits = [entry for entry in found if not entry.in_use]
        else:
            fits = [entry for entry in found if word == entry.name or word in entry.aliases]
            if not fits:
                names = ", ".join(dict.fromkeys(e.name for e in found if not e.in_use)) or "nothing"
                wrong.append(f"no host has {word!r}; what may be deleted: {names}")
            used = [entry for entry in fits if entry.in_use]
            if used and len(used) == len(fits):
                reasons = ", ".join(f"on {entry.host}: {entry.in_use}" for entry in used)
                wrong.append(f"{word} is in use {reasons}")
        picked |= {id(entry): entry for entry in fits if not entry.in_use}
    if not words:
        wrong.append(f"nothing is named: delete=NAME, or delete={UNUSED}")
    # In the order of the table; a name given twice counts once.
    return Choice([entry for entry in found if id(entry) in picked], wrong)


def _image(host: str, image: Image, current: Current) -> Entry:
    in_use = ""
    if image.used_by:
        in_use = f"container {', '.join(image.used_by)}"
    elif _is_current(image, current):
        in_use = "image of this cluster"
    elif image.foreign:
        in_use = f"also {', '.join(image.foreign)}"
    names = [_short(reference) for reference in image.references]
    return Entry(
        host=host,
        kind="image",
        name=names[0],
        aliases=frozenset([*names[1:], *image.references, image.id]),
        bytes=image.bytes,
        last_use=image.created,
        is_estimate=True,
        in_use=in_use,
        key=(("id", image.id),),
    )


def _is_current(image: Image, current: Current) -> bool:
    own = {image.id, *image.references, *(each.partition("@")[2] for each in image.references)}
    wanted = {current.image, *current.image_ids}
    if "@" in current.image:
        wanted.add(current.image.partition("@")[2])
    else:
        tail = current.image.rpartition("/")[2]
        wanted.add(current.image if ":" in tail else f"{current.image}:latest")
    # docker.io is not shown where Docker lists its images.
    wanted |= {each.removeprefix("docker.io/").removeprefix("library/") for each in wanted}
    return not own.isdisjoint(wanted - {""})


def _model(host: str, model: Model, current: Current) -> list[Entry]:
    is_current = model.name == current.model or model.path == current.model
    if not model.snapshots:
        in_use = "model of this cluster" if is_current else ""
        return [
            Entry(
                host=host,
                kind="model",
                name=model.name,
                aliases=frozenset([model.path]),
                bytes=model.bytes,
                last_use=model.last_use,
                is_estimate=not model.has_atime,
                in_use=in_use or ("open files" if model.is_open else ""),
                key=(("path", model.path),),
            )
        ]
    served = _served(model, current) if is_current else frozenset()
    found = []
    for snapshot in model.snapshots:
        in_use = "open files" if snapshot.is_open else ""
        if snapshot.commit in served:
            in_use = "model of this cluster"
        found.append(
            Entry(
                host=host,
                kind="snapshot",
                name=f"{model.name}@{snapshot.commit[:SHORT]}",
                aliases=frozenset([model.name, f"{model.name}@{snapshot.commit}", model.path]),
                bytes=snapshot.bytes,
                last_use=snapshot.last_use,
                is_estimate=not model.has_atime,
                in_use=in_use,
                key=(("path", model.path), ("commit", snapshot.commit)),
            )
        )
    return found


def _served(model: Model, current: Current) -> frozenset[str]:
    """The commits that the cluster may be reading; all where it is not known which.

    A commit that is not here yet is no reason to take away the one before it.
    """
    commits = frozenset(snapshot.commit for snapshot in model.snapshots)
    wanted = {current.commit, current.revision}
    named = frozenset(each.commit for each in model.snapshots if each.commit in wanted)
    if current.commit is None and not named:
        named = frozenset(s.commit for s in model.snapshots if current.revision in s.refs)
    return named or commits


def _leftover(host: str, leftover: Leftover) -> Entry:
    return Entry(
        host=host,
        kind="leftover",
        name=leftover.path,
        aliases=frozenset(),
        bytes=leftover.bytes,
        last_use=leftover.last_use,
        is_estimate=True,
        in_use="a transfer is under way" if leftover.is_open else "",
        key=(("path", leftover.path),),
    )


def _short(reference: str) -> str:
    name, at, digest = reference.partition("@sha256:")
    return f"{name}@sha256:{digest[:SHORT]}" if at else reference


def size_text(size: int) -> str:
    """Bytes for a table: 26.31 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


def age(last: float | None, now: float) -> str:
    """How long ago, roughly. Both in seconds since 1970."""
    if last is None:
        return "unknown"
    seconds = max(0.0, now - last)
    for unit, factor in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // factor)
        if count:
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


def delete_summary(answers: Mapping[str, Deleted]) -> tuple[list[str], bool]:
    """Lines for a person, and whether everything that was confirmed is gone."""
    lines: list[str] = []
    for host, answer in answers.items():
        lines += [f"{host}: deleted {row.name}, {size_text(row.freed)}" for row in answer.deleted]
        lines += [f"{host}: kept {row.name}: {row.why}" for row in answer.refused]
    lines.append(f"freed {size_text(sum(answer.freed for answer in answers.values()))}")
    return lines, not any(answer.refused for answer in answers.values())


def list_argument(
    repositories: list[str], caches: list[str], directories: list[str], transfers: list[str]
) -> dict[str, Any]:
    """The argument of remote/stored.py; role delete gets its entries besides."""
    return {
        "repositories": repositories,
        "caches": caches,
        "directories": directories,
        "transfers": transfers,
    }
