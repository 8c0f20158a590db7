"""The deployment's own output on real GPUs: two nodes made of namespaces on one machine.

`pack` and `plan` run where this repository is developed; `run` needs nothing but Python's
standard library, because it runs on a bare machine that has torch and GPUs, and neither Docker nor
a network.
"""

from __future__ import annotations


class GpuTestError(Exception):
    """Something the person at the keyboard can act on: what, why, and what to do."""
