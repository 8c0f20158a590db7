"""Reads a `docker run` line and env files as Docker does, for nodes made of namespaces.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Container:
    """What of a `docker run` line means something without Docker."""

    program: str
    """Its entry point."""
    arguments: list[str]
    env_files: list[str] = field(default_factory=list)
    volumes: list[tuple[str, str]] = field(default_factory=list)
    """(source on the host or name of a volume, path in the container)"""
    ulimits: dict[str, int] = field(default_factory=dict)
    shm_size: str | None = None
    """As a size of tmpfs: 16g."""

    @property
    def argv(self) -> list[str]:
        """The process."""
        return [self.program, *self.arguments]


def read(run: list[str], image: str) -> Container:
    """Read a `docker run` line of ours: every option is one word, up to the image's name."""
    end = run.index(image)
    options = [word.partition("=")[::2] for word in run[2:end]]
    found: dict[str, Any] = {"env_files": [], "volumes": [], "ulimits": {}}
    for key, value in options:
        if key == "--env-file":
            found["env_files"].append(value)
        elif key == "--volume":
            source, target, *_ = value.split(":")
            found["volumes"].append((source, target))
        elif key == "--ulimit":
            name, _, limit = value.partition("=")
            found["ulimits"][name] = int(limit)
        elif key == "--shm-size":
            found["shm_size"] = value
        elif key == "--entrypoint":
            found["program"] = value
    return Container(arguments=run[end + 1 :], **found)


def environment(text: str) -> dict[str, str]:
    """The variables of an env file: raw NAME=VALUE lines, # begins a comment line."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return dict(line.partition("=")[::2] for line in lines)
