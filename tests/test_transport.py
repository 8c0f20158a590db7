"""ssh to a host that falls silent, over a network that can be cut."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import paramiko
import pytest

from cluster import transport
from tests.started import HEAD, Proxy, proxy


class Server(paramiko.ServerInterface):
    """Runs every command for ever."""

    def check_auth_none(self, username: str) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        return True


@pytest.fixture
def network() -> Iterator[Proxy]:
    """The way to an ssh server."""
    with socket.create_server((HEAD, 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            server = paramiko.Transport(peer)
            server.add_server_key(paramiko.ECDSAKey.generate())
            server.start_server(server=Server())

        threading.Thread(target=serve, daemon=True).start()
        with proxy(listener.getsockname()[1]) as between:
            yield between


@pytest.fixture
def channel(network: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[paramiko.Channel]:
    """A command that runs."""
    monkeypatch.setattr(transport, "ASK_SECONDS", 0.2)
    monkeypatch.setattr(transport, "SILENCE_SECONDS", 0.5)
    connection = transport.Transports("spark-2")(socket.create_connection((HEAD, network.port)))
    connection.start_client()
    connection.auth_none("deploy")
    opened = connection.open_session()
    opened.exec_command("sleep infinity")
    yield opened
    connection.close()


def test_a_silent_host_ends_its_commands(
    network: Proxy, channel: paramiko.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    network.is_frozen = True
    began = time.monotonic()
    assert channel.recv(1) == b""
    assert channel.recv_exit_status() == -1
    assert 0.3 < time.monotonic() - began < 5
    assert "[spark-2] no sign of life" in caplog.text


def test_a_host_that_only_takes_long_is_left_alone(
    channel: paramiko.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    time.sleep(1.5)
    assert channel.get_transport().is_active()
    assert not channel.closed
    assert caplog.text == ""
