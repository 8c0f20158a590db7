"""The tables of this package: data that grows, as YAML with a source per row."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's safe loader, in C where that is built."""


@cache
def table(name: str) -> Any:
    """Read cluster/NAME.yaml, once."""
    text = files("cluster").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=Loader)  # noqa: S506 -- both are safe


def log_patterns() -> dict[str, str]:
    """The patterns of log_lines.yaml, each kind as one: "matters" and "noise"."""
    return {kind: "|".join(patterns) for kind, patterns in table("log_lines").items()}
