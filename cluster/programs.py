"""The programs of remote/ as texts that a host runs with nothing but its own python3. Pure.

A program of several modules becomes one text that holds them all, so that it still travels over
stdin and leaves nothing behind.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

PACKAGE = "cluster.remote"
WIRE = f"{PACKAGE}.wire"

_PRELUDE = '''\
"""Modules of multinode-vllm, each followed by a call that makes it importable."""
import sys, types

def module(name, text):
    parent, _, last = name.rpartition(".")
    if parent and parent not in sys.modules:
        module(parent, "")
        sys.modules[parent].__path__ = []
    made = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec", dont_inherit=True), made.__dict__)
    return made
'''


@cache
def source(program: str) -> str:
    """The text of a program of cluster/remote, to be sent over stdin."""
    name = f"{PACKAGE}.{program}"
    if _text(name) is None:
        name += ".__main__"
    texts: dict[str, str] = {}
    _collect(name, texts)
    main = texts.pop(name)
    if not texts:
        return main
    parts = [f"module({each!r}, {text!r})\n" for each, text in texts.items()]
    run = f'exec(compile({main!r}, {name!r}, "exec", dont_inherit=True))\n'
    return "".join([_PRELUDE, *parts, run])


def keyed(text: str, secrets: Mapping[str, str]) -> str:
    """The text of a program with the secrets of a run in it; argv would show them to everybody.

    secrets: see remote/wire.py
    """
    marker = f"module({WIRE!r}, "
    if text.count(f"\n{marker}") != 1:
        raise ValueError("this program takes no secrets")
    before, after = text.split(f"\n{marker}")
    wire, rest = after.split("\n", 1)
    return f"{before}\n{marker}{wire}.SECRETS.update({dict(secrets)!r})\n{rest}"


def _text(name: str) -> str | None:
    *packages, last = name.removeprefix(f"{PACKAGE}.").split(".")
    path = files(PACKAGE).joinpath(*packages, f"{last}.py")
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _collect(name: str, texts: dict[str, str]) -> None:
    """Add a module after those that it imports."""
    text = _text(name)
    if text is None or name in texts:
        return
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE):
            _collect(str(node.module), texts)
            for each in node.names:
                _collect(f"{node.module}.{each.name}", texts)
    texts[name] = text
