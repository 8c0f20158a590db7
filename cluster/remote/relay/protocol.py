"""What a receiver and a sender agree on, beyond wire.py.

A receiver's first connection, of kind CONTROL, carries the manifest and signs of life. The others
carry requests, (number of the file, number of the piece) each, and what is asked for: the bytes of
a piece, then a mark.
"""

from __future__ import annotations

from typing import Any, Dict, Tuple

from cluster.remote.relay.manifest import cores

STREAMS = 8
"""At most, per receiver: a stream takes a core and gives about 1 GB/s."""
AHEAD = 2
"""Requests that a stream has under way."""
SMALL = 256 << 10
"""Up to this size files are gathered before they are sent."""
BATCH = 64
"""Files in one request; so many per stream are open at the same time."""
MANIFEST_BYTES = 256 << 20
GOOD, CHANGED = b"\0", b"\1"
"""Marks: the piece is what the manifest describes, or the file has changed since."""

Piece = Tuple[int, int]
"""(number of the file in the manifest, number of the piece in the file)"""


def streams_of(wanted: Dict[str, Any]) -> int:
    """As many as there are cores here, and four where there are fewer: they wait for the disk."""
    return max(1, min(STREAMS, int(wanted.get("streams") or max(4, cores()))))
