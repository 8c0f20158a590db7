"""What a run remembers of each host from one operation to the next."""

from __future__ import annotations

from typing import TypeVar

from pyinfra.api import Host

Kind = TypeVar("Kind")


def remembered(kind: type[Kind], host: Host) -> Kind:
    """A host's one object of a kind; it begins with its defaults."""
    # `host` is often pyinfra's proxy of the current host, whose hash changes with it; the real
    # host's own dictionary is what stays.
    memory: Kind = host.connector_data.setdefault(f"{kind.__module__}.{kind.__name__}", kind())
    return memory
