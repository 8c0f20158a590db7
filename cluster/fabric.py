"""Does a host really have the fabric address that cluster.yaml gives it? Pure."""

from __future__ import annotations

from cluster.settings import Cluster

Addresses = dict[str, list[str]]
"""The IPv4 addresses of each interface of a host."""


def fabric_problem(cluster: Cluster, name: str, addresses: Addresses) -> tuple[str, str] | None:
    """Return (what is wrong, what to do) with a host's fabric address or interface, or None.

    NCCL and gloo die or hang, minutes later and on another host, when this is wrong.
    """
    fabric = cluster.hosts[name].fabric
    address, interface = str(fabric.address.ip), fabric.interface
    if address in addresses.get(interface, []):
        return None
    owner = next((other for other, owned in addresses.items() if address in owned), None)
    if owner is not None:
        return (
            f"the fabric address {address} is on interface {owner}, not on {interface}",
            f"set hosts.{name}.fabric.interface: {owner}",
        )
    found = ", ".join(f"{other} {' '.join(owned)}" for other, owned in addresses.items())
    if interface not in addresses:
        return (
            f"no interface {interface} with an IPv4 address, and {address} is nowhere; this host "
            f"has {found or 'none'}",
            f"correct hosts.{name}.fabric, or bring the link up",
        )
    return (
        f"interface {interface} has {' '.join(addresses[interface])}, not the fabric address "
        f"{address}; this host has {found}",
        f"correct hosts.{name}.fabric.address",
    )
