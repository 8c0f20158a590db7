"""pyinfra operations of tasks/discover.py: look at hosts, let them meet, propose their fabric."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import click
import paramiko
from pydantic import ValidationError
from pyinfra import host, logger, state
from pyinfra.api import Host, operation

from cluster import hosts_section
from cluster.discovery import PORTS_TRIED, Landscape, Meetings, NoFabricError, propose
from cluster.facts import HostProbe
from cluster.hosts_section import EditError, Entry
from cluster.load import cluster_file
from cluster.memory import remembered
from cluster.positions import FileError
from cluster.probe import Meeting, Probe
from cluster.programs import source
from cluster.settings import HOST_NAME, RESERVED_HOST_NAMES
from cluster.shell import Commands, refuse

USER_SSH_CONFIG = "~/.ssh/config"


@dataclass
class _Seen:
    """What this run has seen of a host."""

    probe: Probe | None = None
    meetings: dict[str, Meeting] | None = None


_seen = partial(remembered, _Seen)


def _hosts() -> list[Host]:
    """The hosts of this run, in the order in which they were given."""
    active = set(state.inventory.get_active_hosts())
    return [each for each in state.inventory if each in active]


def first_host() -> str:
    """The host that speaks for all: the first one of the run."""
    return _hosts()[0].name


@operation()
def looked() -> Commands:
    """Read interfaces, RDMA devices and GPUs of this host. Nothing is changed there."""
    if not state.is_executing:
        host.noop("looked at when it runs")
        return
    wanted: dict[str, Any] = {
        **{"root": "/", "model": None, "containers": [], "label": "-", "ports": []},
        **{"interface": "", "meet": None},
    }
    found = _probe(wanted)
    try:
        if "garbage" in found:
            raise ValueError(found["garbage"])
        _seen(host).probe = Probe.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        yield refuse(f"{host.name}: the probe's answer is not usable: {place}: {first['msg']}")
        return
    except ValueError as error:
        yield refuse(
            f"{host.name}: {error}", "The host needs Python 3.8 or newer, and ssh has to reach it."
        )
        return
    host.noop("looked at")


@operation()
def met() -> Commands:
    """Try every network that this host shares with others; all hosts do so at the same time."""
    if not state.is_executing:
        host.noop("tried when it runs")
        return
    meetings = _landscape().meetings(_names()[host.name], _random_ports())
    found = _probe({"meetings": meetings}).get("meetings", {}) if meetings else {}
    try:
        _seen(host).meetings = {
            network: Meeting.model_validate(meeting) for network, meeting in found.items()
        }
    except (ValidationError, AttributeError):
        yield refuse(f"{host.name}: what came of the meetings is not usable: {found!r:.120}")
        return
    host.noop(f"tried {len(meetings)} networks")


def _probe(wanted: dict[str, Any]) -> dict[str, Any]:
    found = host.get_fact(
        HostProbe, wanted=wanted, _stdin=source("probe"), _ignore_errors=True, _timeout=60
    )
    return {"garbage": "the probe did not run, see above"} if found is None else found


@cache
def _random_ports() -> list[int]:
    """High ports as the kernel gives them to Ray, gloo and NCCL; the same on all hosts of a run."""
    return random.sample(range(32768, 60999), PORTS_TRIED + 1)


def _landscape() -> Landscape:
    names = _names()
    probes = {
        names[each.name]: probe for each in _hosts() if (probe := _seen(each).probe) is not None
    }
    fabrics = {
        name: each.get("fabric") for name, each in _known_hosts().items() if isinstance(each, dict)
    }
    current = {
        name: str(fabric.get("address")).partition("/")[0]
        for name, fabric in fabrics.items()
        if isinstance(fabric, dict)
    }
    return Landscape(probes, current)


@operation()
def proposed(write: Any = None, overwrite: bool = False) -> Commands:
    """Print the hosts section of cluster.yaml, or what differs from it; or write a file.

    + write: path of a file to write; None prints
    + overwrite: write although the file is there
    """
    if not state.is_executing:
        host.noop("proposed when it runs")
        return
    names = _names()
    meetings: Meetings = {names[each.name]: _seen(each).meetings or {} for each in _hosts()}
    try:
        _check(names)
        proposals = propose(_landscape(), meetings)
        entries = [
            Entry(names[each.name], proposals[names[each.name]], _ssh(each, names))
            for each in _hosts()
        ]
        _show_warnings(entries)
        if write is None:
            _print(entries)
        else:
            _write(entries, write, overwrite)
    except NoFabricError as error:
        yield refuse(*error.lines)
        return
    except (DiscoverError, EditError, FileError) as error:
        yield refuse(str(error))
        return
    host.noop("proposed")


class DiscoverError(ValueError):
    """Something a user has to decide; the message says what."""


def _names() -> dict[str, str]:
    """The names for cluster.yaml, by pyinfra's.

    They are as given; for an address it is the name that the existing file has for it, or the
    hostname.
    """
    given = {each.name: each.name.rpartition("/")[2] for each in _hosts()}  # @ssh/NAME
    sections = {
        name: each.get("ssh") for name, each in _known_hosts().items() if isinstance(each, dict)
    }
    known = {
        str(ssh.get("address")): name
        for name, ssh in sections.items()
        if isinstance(ssh, dict) and name not in given.values()
    }
    hostnames = {
        each.name: probe.hostname.partition(".")[0]
        for each in _hosts()
        if (probe := _seen(each).probe) is not None
    }
    names: dict[str, str] = {}
    for name, short in given.items():
        hostname = hostnames.get(name, "")
        is_own = list(hostnames.values()).count(hostname) == 1 and hostname not in given.values()
        own = hostname if _is_address(short) and is_own and _fits(hostname) else short
        names[name] = known.get(short, own)
    return names


def _known_hosts() -> dict[str, Any]:
    """The hosts of the existing cluster.yaml as plain values; {} without a file."""
    try:
        return hosts_section.hosts_of(cluster_file().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, FileError):
        return {}


def _check(names: dict[str, str]) -> None:
    for name in names.values():
        if not _fits(name):
            raise DiscoverError(
                f"{name!r} cannot be a host's name in cluster.yaml (letters, digits, '.' and '-'; "
                "not all, head, workers); give the host another name in ~/.ssh/config"
            )
    if len(set(names.values())) < len(names):
        raise DiscoverError(f"one host was given twice: {', '.join(names)}")


def _fits(name: str) -> bool:
    return bool(re.match(HOST_NAME, name)) and name not in RESERVED_HOST_NAMES


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _ssh(each: Host, names: dict[str, str]) -> dict[str, str | int]:
    """How ssh reaches a host, as far as a deployment would not know it by itself.

    ~/.ssh/config applies to a deployment, too, except that a jump through another host of the
    cluster is better written down: see transport.py.
    """
    given = each.data.get("ssh_config_file")
    short = each.name.rpartition("/")[2]
    address = str(each.data.get("ssh_hostname") or short)
    entry = _ssh_config(str(given or USER_SSH_CONFIG)).lookup(address)
    found: dict[str, Any] = {
        "address": address if address != names[each.name] else None,
        "user": each.data.get("ssh_user"),
        "port": each.data.get("ssh_port"),
        "key": each.data.get("ssh_key"),
        "known_hosts": each.data.get("ssh_known_hosts_file"),
    }
    if given:
        from_config = {
            "address": entry["hostname"] if entry["hostname"] != names[each.name] else None,
            "user": entry.get("user"),
            "port": entry.get("port"),
            "key": next(iter(entry.get("identityfile", [])), None),
            "known_hosts": entry.get("userknownhostsfile", "").partition(" ")[0] or None,
        }
        found = {key: value or from_config[key] for key, value in found.items()}
    jump = entry.get("proxyjump", "").rpartition(",")[2].rpartition("@")[2].partition(":")[0]
    via = next((names[name] for name in names if jump == name.rpartition("/")[2]), None)
    if via is not None:
        found.update(address=entry["hostname"], via=via)
    if found["port"] is not None:
        found["port"] = int(found["port"]) if int(found["port"]) != 22 else None
    return {key: value for key, value in found.items() if value is not None}


@cache
def _ssh_config(path: str) -> paramiko.SSHConfig:
    try:
        return paramiko.SSHConfig.from_path(str(Path(path).expanduser()))
    except (OSError, UnicodeDecodeError, paramiko.ConfigParseError):
        return paramiko.SSHConfig()


def _show_warnings(entries: list[Entry]) -> None:
    for entry in entries:
        for text in entry.proposal.warnings:
            logger.warning(f"{entry.name}: {text}")


def _print(entries: list[Entry]) -> None:
    path = cluster_file()
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else None
        edit = hosts_section.edited(text, entries) if text is not None else None
    except (OSError, UnicodeDecodeError, FileError, EditError) as error:
        logger.warning(f"{path} is not compared: {error}")
        text = edit = None
    if text is None or edit is None:
        click.echo(hosts_section.section(entries), nl=False)
        return
    for entry in entries:
        if entry.name in edit.kept:
            for line in hosts_section.explained(entry):
                logger.info(f"    {click.style(entry.name, bold=True)} {line}")
    difference = hosts_section.diff(text, edit.text, str(path))
    click.echo(difference, nl=False)
    if difference:
        logger.info(f"    {path} is unchanged. To have it so, the same command with:")
        logger.info(f"      --data write={path} --data overwrite=yes")
    else:
        logger.info(f"    {path} says the same already")


def _write(entries: list[Entry], write: Any, overwrite: bool) -> None:
    if not isinstance(write, str) or not write.strip():
        raise DiscoverError(f"--data write={write}: give the path of a file, write=PATH")
    path = Path(write).expanduser()
    if path.exists() and not overwrite:
        raise DiscoverError(
            f"{path} is there already and stays as it is; to replace its hosts section: "
            "--data overwrite=yes"
        )
    with _as_sentence(path):
        base = next((each for each in (path, cluster_file()) if each.is_file()), None)
        if base is None:
            text = hosts_section.new_file(entries)
        else:
            with _as_sentence(base):
                text = hosts_section.edited(base.read_text(encoding="utf-8"), entries).text
        fresh = path.with_name(f"{path.name}.new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    logger.info(f"    {path} is written")


@contextmanager
def _as_sentence(path: Path) -> Iterator[None]:
    """Turn what can go wrong with a file into a DiscoverError that names it."""
    try:
        yield
    except (OSError, UnicodeDecodeError, FileError, EditError) as error:
        line = f":{error.line}" if isinstance(error, FileError) and error.line else ""
        reason = getattr(error, "strerror", None) or error
        raise DiscoverError(f"{path}{line}: {reason}; nothing is written") from None
