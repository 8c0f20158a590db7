"""Proves every network layer between the ranks, inside the container that will serve.

Argument (JSON): rank, world, head (fabric address of rank 0), port (of the store there), seconds
(for one layer), gcs (HOST:PORT of Ray, or null without Ray).

All ranks run this at the same time. Every layer runs in a child of its own, forked before any
store or thread exists, so that a layer that hangs in C++ can be watched from outside, named with
the address it dials, and killed. The last line of stdout is one JSON object:
{rank, hostname, addresses {interface: [address]}, environment, seconds, layers {name: result}};
a result has state (ok, failed, hangs, not tried, skipped), seconds, addresses, dialling, reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import importlib
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from datetime import timedelta
from typing import Any

Result = dict[str, Any]
Layer = Callable[[dict[str, Any]], Generator[None, None, Result]]
"""Prepares (imports), yields, and on the word goes through the layer; returns what it found."""
Socket = tuple[str, str, int, str, int]
"""(state, local address, local port, remote address, remote port)"""

START_SECONDS = 60
"""torch and vLLM from a cold disk."""
SKEW_SECONDS = 12
"""How much later than the first the last host may start."""
MEET_SECONDS = START_SECONDS
"""Until all ranks have come to a layer: the slowest may still read vLLM from a cold disk."""
MERCY_SECONDS = 2
"""How long a layer goes on after another rank has said that it failed there."""
TOTAL_SECONDS = 170
KNOCK_SECONDS = 3
NOTHING_BACK = "nothing comes back: a firewall, or a network that is not reached from here"
NCCL_RAS_PORT = 28028
TCP_STATES = {"01": "established", "02": "syn-sent", "0A": "listen"}
ENVIRONMENT = ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "RAY_ADDRESS")
COMPLAINT = re.compile(r"error|warn|fail|unable|refused|timed out", re.IGNORECASE)
HARMLESS = re.compile(r"hostname of the client socket cannot be retrieved")
NCCL_LINES = re.compile(r"Bootstrap|NET/|Using network|NCCL WARN")
SIOCGIFCONF = 0x8912
PR_SET_PDEATHSIG = 1
SMALL_BYTES, LARGE_BYTES = 4 << 20, 64 << 20
LATENCY_BYTES = 8 << 10
"""About the hidden state of one token: what tensor parallelism waits for, twice per layer."""


class LayerError(Exception):
    """A layer does not work; what was found besides the reason is in `found`."""

    def __init__(self, reason: str, state: str = "failed", **found: Any) -> None:
        super().__init__(reason)
        self.result: Result = dict(found, state=state, reason=reason)


def ray(wanted: dict[str, Any]) -> Generator[None, None, Result]:
    """The address under which Ray has registered this node."""
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    yield
    address = os.environ.get("RAY_ADDRESS", "")
    if not re.fullmatch(r"[^:/]+:\d+", address):
        address = wanted["gcs"]
    node_id, own = raylet()
    if own is None:
        raise LayerError("no raylet runs in this container", gcs=address)
    state = GlobalState()
    state._initialize_global_state(GcsClientOptions.create(address, None, True, False))
    alive = [node for node in state.node_table() if node["Alive"]]
    for node in alive:
        is_own = node["NodeID"] == node_id if node_id else node["NodeManagerAddress"] == own
        if is_own:
            return {"addresses": [node["NodeManagerAddress"]], "gcs": address}
    known = ", ".join(sorted(node["NodeManagerAddress"] for node in alive)) or "none"
    raise LayerError(
        f"Ray at {address} lists {known}, and not this node, whose raylet calls itself {own}",
        addresses=[own],
        gcs=address,
    )


def raylet() -> tuple[str | None, str | None]:
    """(node id, address) from the command line of the raylet here; the id since Ray 2.52."""
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as stream:
                words = stream.read().decode(errors="replace").split("\0")
        except OSError:
            continue
        if os.path.basename(words[0]) == "raylet":
            pairs = dict(word.lstrip("-").partition("=")[::2] for word in words)
            return pairs.get("node_id"), pairs.get("node_ip_address")
    return None, None


def c10d(wanted: dict[str, Any]) -> Generator[None, None, Result]:
    """A rendezvous in a TCPStore on the head's fabric address."""
    yield
    rank, limit = wanted["rank"], wanted["seconds"] + SKEW_SECONDS
    if rank:
        knock_store(wanted)
    try:
        store = new_store(wanted, is_master=rank == 0)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise LayerError(f"port {wanted['port']} is taken here; run it again") from None
        raise
    store.set(f"c10d/{rank}", "here")
    keys = {other: f"c10d/{other}" for other in range(wanted["world"])}
    try:
        store.wait(list(keys.values()), timedelta(seconds=limit))
    except RuntimeError:
        missing = [other for other, key in keys.items() if not store.check([key])]
        raise LayerError(f"did not come within {limit} s", missing=missing) from None
    HELD.append(store)  # on the head it serves the layers after this one
    return {}


HELD: list[Any] = []


def knock_store(wanted: dict[str, Any]) -> None:
    """Wait for the head's store: torch's own client would wait for minutes and not say why."""
    place = (wanted["head"], wanted["port"])
    label = "%s:%d" % place
    began, last_refused = time.monotonic(), 0.0
    while True:
        why = knock(*place, timeout=1)
        now = time.monotonic()
        if why is None:
            return
        if why == "refused":  # the head is there; its program may still be starting
            last_refused = now
            if now - began > wanted["seconds"] + SKEW_SECONDS:
                raise LayerError(f"{label}: connection refused: the head's program did not start")
        elif now - max(began, last_refused) > wanted["seconds"] - 1:
            raise LayerError(f"{label}: {why}", "hangs", dialling=[label])
        time.sleep(0.05)


def gloo(wanted: dict[str, Any]) -> Generator[None, None, Result]:
    """An all-reduce with gloo."""
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    yield
    join(distributed, "gloo", wanted)
    check_sum(distributed, wanted, torch.full((1000,), float(wanted["rank"] + 1)))
    return {}


def queue(wanted: dict[str, Any]) -> Generator[None, None, Result]:
    """A round trip to every other rank's queue, where vLLM would open it."""
    get_ip = vllm_get_ip()
    zmq = importlib.import_module("zmq")
    yield
    rank, end = wanted["rank"], time.monotonic() + wanted["seconds"] - 0.5
    others = [other for other in range(wanted["world"]) if other != rank]
    store = new_store(wanted)
    own = str(get_ip())
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.setsockopt(zmq.IPV6, ":" in own)
    try:
        server.bind(f"tcp://[{own}]:*" if ":" in own else f"tcp://{own}:*")
    except zmq.ZMQError as error:
        store.set(f"queue/{rank}", "")
        reason = os.strerror(error.errno).lower()
        raise LayerError(f"cannot listen on {own}: {reason}", addresses=[own]) from None
    store.set(f"queue/{rank}", server.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0"))
    endpoints = {other: store.get(f"queue/{other}").decode() for other in others}
    missing = [other for other in others if not endpoints[other]]
    if missing:
        raise LayerError("has no queue", addresses=[own], missing=missing)
    # ZMQ would dial for ever without a word; a plain connection says why.
    for other in others:
        address, _, port = endpoints[other][len("tcp://") :].rpartition(":")
        why = knock(address.strip("[]"), int(port), KNOCK_SECONDS)
        if why is not None:
            raise LayerError(
                f"does not answer at {address}:{port}: {why}",
                "hangs",
                addresses=[own],
                dialling=[f"{address}:{port}"],
                missing=[other],
            )
    silent = exchange(zmq, context, server, endpoints, lambda: reached(store, wanted), end)
    if silent:
        raise LayerError("does not answer over ZMQ", "hangs", addresses=[own], missing=silent)
    return {"addresses": [own]}


def reached(store: Any, wanted: dict[str, Any]) -> bool:
    """Say that this rank has its answers; whether every rank has."""
    store.set(f"queue/done/{wanted['rank']}", "1")
    return bool(store.check([f"queue/done/{other}" for other in range(wanted["world"])]))


def exchange(
    zmq: Any,
    context: Any,
    server: Any,
    endpoints: dict[int, str],
    all_done: Callable[[], bool],
    end: float,
) -> list[int]:
    """Ask every endpoint and answer who asks, until all have; return who did not answer."""
    poller = zmq.Poller()
    poller.register(server, zmq.POLLIN)
    silent = {}
    for other, endpoint in endpoints.items():
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.IPV6, "[" in endpoint)
        client.connect(endpoint)
        client.send(b"prove")
        poller.register(client, zmq.POLLIN)
        silent[client] = other
    while time.monotonic() < end:
        for ready, _ in poller.poll(50):
            message = ready.recv_multipart()
            if ready is server:
                server.send_multipart(message)
            else:
                silent.pop(ready, None)
        if not silent and all_done():
            return []
    return sorted(silent.values())


def vllm_get_ip() -> Callable[[], str]:
    """vLLM's own choice of address; it moved in 0.11."""
    try:
        module = importlib.import_module("vllm.utils.network_utils")
    except ImportError:
        module = importlib.import_module("vllm.utils")
    found: Callable[[], str] = module.get_ip
    return found


def nccl(wanted: dict[str, Any]) -> Generator[None, None, Result]:
    """An all-reduce between the first GPU of every node, and how fast it is."""
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.zeros(1, device="cuda:0")  # starts CUDA, which takes seconds, before the clock runs
    yield
    store, world = new_store(wanted), wanted["world"]
    store.set(f"nccl/gpu/{wanted['rank']}", "1" if has_gpu else "0")
    lacking = [other for other in range(world) if store.get(f"nccl/gpu/{other}") == b"0"]
    if len(lacking) == world:
        return {"state": "skipped", "reason": "torch sees no GPU in this container"}
    if not has_gpu:
        raise LayerError("torch sees no GPU in this container", no_gpu=True)
    if lacking:
        raise LayerError("has no GPU", missing=lacking)
    os.environ.update(
        NCCL_DEBUG="INFO",
        NCCL_DEBUG_SUBSYS="INIT,BOOTSTRAP,NET",
        NCCL_DEBUG_FILE=wanted["nccl_log"],
    )
    join(distributed, "nccl", wanted)
    check_sum(distributed, wanted, torch.full((1000,), wanted["rank"] + 1.0, device="cuda:0"))

    def seconds(size: int, count: int) -> float:
        values = torch.zeros(size // 4, device="cuda:0")
        distributed.all_reduce(values)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            distributed.all_reduce(values)
        torch.cuda.synchronize()
        slowest = torch.tensor([(time.perf_counter() - began) / count], device="cuda:0")
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
        return float(slowest.item())

    latency = seconds(LATENCY_BYTES, 10)
    size, each = SMALL_BYTES, seconds(SMALL_BYTES, 2)
    # The slowest rank's time, so that all decide alike.
    if each * (LARGE_BYTES / SMALL_BYTES) * 6 < wanted["seconds"] / 2:
        size, each = LARGE_BYTES, seconds(LARGE_BYTES, 5)
    # Bus bandwidth as nccl-tests define it: 2 (n - 1) / n of the size crosses every link.
    busbw = size / each * 2 * (world - 1) / world / 1e9
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    return {
        **{"busbw_gb_s": round(busbw, 3), "bytes": size, "nccl": version},
        "latency_us": round(latency * 1e6),
    }


def join(distributed: Any, backend: str, wanted: dict[str, Any]) -> None:
    """Form a process group in the head's store."""
    distributed.init_process_group(
        backend,
        store=distributed.PrefixStore(backend, new_store(wanted)),
        rank=wanted["rank"],
        world_size=wanted["world"],
        timeout=timedelta(seconds=wanted["seconds"] + MERCY_SECONDS),
    )


def check_sum(distributed: Any, wanted: dict[str, Any], values: Any) -> None:
    """All-reduce values that are rank + 1 everywhere; raise Failure where the sum is wrong."""
    distributed.all_reduce(values)
    expected = wanted["world"] * (wanted["world"] + 1) / 2
    low, high = float(values.min()), float(values.max())
    if not low == high == expected:
        raise LayerError(f"the sum is wrong: {low} to {high} instead of {expected}")


def new_store(wanted: dict[str, Any], is_master: bool = False) -> Any:
    """A client of the head's store, or that store."""
    distributed = importlib.import_module("torch.distributed")
    return distributed.TCPStore(
        wanted["head"],
        wanted["port"],
        is_master=is_master,
        timeout=timedelta(seconds=wanted["seconds"]),
        wait_for_workers=False,
    )


def knock(address: str, port: int, timeout: float) -> str | None:
    """Return None where something accepts a connection, else why not."""
    try:
        socket.create_connection((address, port), timeout).close()
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return NOTHING_BACK
    except OSError as error:
        # socket.timeout is no TimeoutError before Python 3.10
        if isinstance(error, socket.timeout):
            return NOTHING_BACK
        return (error.strerror or str(error)).lower()
    return None


class Child:
    """One layer in a process of its own."""

    def __init__(
        self, name: str, layer: Layer, wanted: dict[str, Any], open_fds: list[int]
    ) -> None:
        """Fork. `open_fds` are the parent's ends of the pipes of other children."""
        self.name = name
        self.result: Result | None = None
        self.is_ready = False
        self.seen: set[Socket] = set()
        self.now: list[Socket] = []
        self.began = self.end = time.monotonic()
        self.rest = b""
        self.log = os.fdopen(os.memfd_create(name), "rb")
        results, write_results = os.pipe()
        read_orders, orders = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for fd in [*open_fds, results, orders]:
                os.close(fd)
            os.dup2(self.log.fileno(), 1)
            os.dup2(self.log.fileno(), 2)
            live(layer, wanted, read_orders, write_results)
        os.close(write_results)
        os.close(read_orders)
        os.set_blocking(results, False)
        self.results, self.orders = results, orders
        open_fds += [results, orders]

    def go(self, seconds: float) -> None:
        """Let it begin; from now on it has so many seconds."""
        self.began = time.monotonic()
        self.end = self.began + seconds
        with contextlib.suppress(OSError):  # it has died; read() will say so
            os.write(self.orders, b"g")

    def read(self) -> None:
        """Take in what it says."""
        try:
            data = os.read(self.results, 1 << 20)
        except BlockingIOError:
            return
        if not data and self.result is None:
            _, status = os.waitpid(self.pid, 0)
            self.pid = 0
            code = os.waitstatus_to_exitcode(status)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.finish({"state": "failed", "reason": f"its process died ({how})"})
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message == "ready":
                self.is_ready = True
            else:
                self.finish(message)

    def look(self) -> None:
        """Take note of its TCP sockets."""
        if self.pid:
            self.now = sockets(self.pid)
            self.seen.update(self.now)

    def finish(self, result: Result) -> None:
        """Have a result."""
        self.result = dict({"state": "ok"}, **result)
        self.result["seconds"] = round(time.monotonic() - self.began, 2)

    def hang(self, reason: str) -> None:
        """Have it end here, with the address that it dials."""
        self.look()
        dialling = sorted({f"{row[3]}:{row[4]}" for row in self.now if row[0] == "syn-sent"})
        self.kill()
        self.finish({"state": "hangs", "reason": reason, "dialling": dialling})

    def kill(self) -> None:
        """End the process."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def complaints(self) -> list[str]:
        """The last lines it printed that sound like the reason of a failure."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()
        return [
            line.strip()[:400]
            for line in lines
            if COMPLAINT.search(line) and not HARMLESS.search(line)
        ][-3:]


def live(layer: Layer, wanted: dict[str, Any], orders: int, results: int) -> None:
    """Be a child: prepare, wait for the word, go through the layer, say how it went."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        def say(message: Any) -> None:
            os.write(results, json.dumps(message).encode() + b"\n")

        try:
            steps = layer(wanted)
            next(steps)
            say("ready")
            if os.read(orders, 1):
                try:
                    next(steps)
                except StopIteration as stop:
                    say(stop.value)
        except LayerError as error:
            say(error.result)
        except Exception as error:  # whatever torch, ZMQ or Ray raise is this layer's result
            say({"state": "failed", "reason": first_line(error)})
        # What it holds open is in use by the other ranks until the parent has finished.
        while os.read(orders, 1):
            pass
        code = 0
    finally:
        os._exit(code)


def first_line(error: BaseException) -> str:
    """What an exception says, without the C++ frames below it."""
    text = " ".join(str(error).partition("Exception raised from")[0].split())
    return f"{type(error).__name__}: {text}"[:500]


def sockets(pid: int) -> list[Socket]:
    """The TCP sockets of a process that dial, listen or are connected."""
    inodes = set()
    for path in glob.glob(f"/proc/{pid}/fd/*"):
        try:
            target = os.readlink(path)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6") if inodes else ():
        try:
            with open(f"/proc/{pid}/net/{table}") as stream:
                text = stream.read()
        except OSError:
            continue
        found += [row for inode, row in tcp_table(text) if inode in inodes]
    return found


def tcp_table(text: str) -> list[tuple[str, Socket]]:
    """Parse /proc/net/tcp or tcp6: (inode, socket) of those that dial, listen or are connected."""
    rows = []
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) > 9 and words[3] in TCP_STATES:
            local, remote = (endpoint(word) for word in words[1:3])
            rows.append((words[9], (TCP_STATES[words[3]], *local, *remote)))
    return rows


def endpoint(text: str) -> tuple[str, int]:
    """Parse 0CC8A8C0:1F90, or an IPv6 address in the same way: (address, port)."""
    packed, _, port = text.partition(":")
    words = [int(packed[index : index + 8], 16) for index in range(0, len(packed), 8)]
    data = struct.pack(f"={len(words)}I", *words)
    if len(data) == 16 and data[:12] == b"\0" * 10 + b"\xff\xff":
        data = data[12:]
    family = socket.AF_INET if len(data) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, data), int(port, 16)


def used(rows: Iterable[Socket], port: int, of_store: bool) -> list[str]:
    """The own addresses of sockets: those of connections with the store, or all others."""
    return sorted(
        {
            local
            for state, local, local_port, _, remote_port in rows
            if state != "syn-sent"
            and (port in (local_port, remote_port)) == of_store
            and local_port != NCCL_RAS_PORT
            and local not in ("0.0.0.0", "::")  # noqa: S104 -- a listener on all says nothing
        }
    )


def addresses() -> dict[str, list[str]]:
    """The IPv4 addresses of every interface here; needs no `ip`."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    size = 40  # of struct ifreq on 64 bits: the name in 16 bytes, then a sockaddr_in
    buffer = ctypes.create_string_buffer(size * 256)
    request = struct.pack("iL", len(buffer), ctypes.addressof(buffer))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFCONF, request)
    length = struct.unpack("iL", answer)[0]
    for start in range(0, length, size):
        row = buffer.raw[start : start + size]
        label = row[:16].partition(b"\0")[0].decode(errors="replace")
        name = label.partition(":")[0]  # eth0:1 is a second address of eth0
        found.setdefault(name, []).append(socket.inet_ntoa(row[20:24]))
    return found


class Prover:
    """The parent: takes its children through the layers, in step with the other ranks."""

    def __init__(self, wanted: dict[str, Any], layers: dict[str, Layer]) -> None:
        self.wanted = wanted
        self.rank, self.world, self.seconds = wanted["rank"], wanted["world"], wanted["seconds"]
        open_fds: list[int] = []
        self.children = {
            name: Child(name, layer, wanted, open_fds) for name, layer in layers.items()
        }
        self.store: Any = None

    def walk(self) -> dict[str, Result]:
        """Go through all layers; return every one's result."""
        # Ray needs no other rank to go with it.
        first = [child for name, child in self.children.items() if name in ("ray", "c10d")]
        for child in first:
            self.prepare(child)
        for child in first:
            if child.is_ready:
                child.go(self.seconds + (SKEW_SECONDS + 1 if child.name == "c10d" else 0))
        self.follow(first)
        rendezvous = self.children["c10d"].result or {}
        if rendezvous["state"] == "ok":
            try:
                self.store = new_store(dict(self.wanted, seconds=5))
            except Exception as error:
                rendezvous.update(state="failed", reason=first_line(error))
        for child in self.children.values():
            if child not in first:
                self.step(child)
        self.part()
        return {name: self.report(child) for name, child in self.children.items()}

    def step(self, child: Child) -> None:
        """Take one child through its layer, together with the other ranks."""
        if self.store is None:
            child.finish({"state": "not tried", "reason": "there is no rendezvous (c10d)"})
            return
        self.prepare(child)
        try:
            missing = self.meet(child.name)
            if missing:
                reason = f"did not come to this layer within {MEET_SECONDS} s"
                child.finish({"state": "not tried", "reason": reason, "missing": missing})
                return
            if child.is_ready:
                child.go(self.seconds)
            self.follow([child])
            state = (child.result or {})["state"]
            if state in ("failed", "hangs"):
                self.store.set(f"{child.name}/failed", str(self.rank))
        except Exception as error:
            self.store = None
            reason = f"the store on the head is lost: {first_line(error)}"
            if child.result is None:
                child.finish({"state": "failed", "reason": reason})

    def prepare(self, child: Child) -> None:
        """Wait until a child has imported what it needs, or cannot."""
        end = time.monotonic() + START_SECONDS
        while not child.is_ready and child.result is None:
            select.select([child.results], [], [], 0.5)
            child.read()
            if time.monotonic() > end:
                child.hang(f"its imports did not end within {START_SECONDS} s")

    def meet(self, name: str) -> list[int]:
        """Wait until every rank has come to a layer; return those that have not."""
        self.store.set(f"{name}/here/{self.rank}", "1")
        keys = {other: f"{name}/here/{other}" for other in range(self.world)}
        end = time.monotonic() + MEET_SECONDS
        while not self.store.check(list(keys.values())):
            if time.monotonic() > end:
                return [other for other, key in keys.items() if not self.store.check([key])]
            time.sleep(0.03)
        return []

    def follow(self, children: list[Child]) -> None:
        """Wait until every child has a result; one that takes too long hangs."""
        mercy: float | None = None
        while True:
            going = [child for child in children if child.result is None]
            if not going:
                return
            select.select([child.results for child in going], [], [], 0.05)
            for child in going:
                child.look()
                child.read()
                now = time.monotonic()
                if child.result is not None:
                    child.look()  # a layer may be through before anyone has looked
                    continue
                if now > child.end:
                    child.hang(f"no end after {round(child.end - child.began)} s")
                elif self.store is not None and mercy is None:
                    if self.store.check([f"{child.name}/failed"]):
                        mercy = now + MERCY_SECONDS
                elif mercy is not None and now > mercy:
                    child.hang("failed, and this one waits for it")
                    failed = int(self.store.get(f"{child.name}/failed"))
                    assert child.result is not None
                    child.result["missing"] = [failed]

    def part(self) -> None:
        """Keep the head's store open until every rank has finished with it."""
        if self.store is None:
            return
        # The layers have their results already, whatever happens to the store.
        with contextlib.suppress(Exception):
            self.store.set(f"end/{self.rank}", "1")
            keys = [f"end/{other}" for other in range(self.world)]
            end = time.monotonic() + self.seconds + MERCY_SECONDS
            while self.rank == 0 and time.monotonic() < end and not self.store.check(keys):
                time.sleep(0.03)

    def report(self, child: Child) -> Result:
        """A child's result with what was seen from outside."""
        assert child.result is not None
        port, result = self.wanted["port"], child.result
        result.setdefault("addresses", used(child.seen, port, of_store=child.name == "c10d"))
        if result["state"] in ("failed", "hangs"):
            result["complaints"] = child.complaints()
        if child.name == "nccl":
            result["nccl_lines"] = nccl_lines(self.wanted["nccl_log"])
        return result


def nccl_lines(path: str) -> list[str]:
    """What NCCL said about its networks."""
    try:
        with open(path, errors="replace") as stream:
            lines = [line.strip() for line in stream if NCCL_LINES.search(line)]
    except OSError:
        return []
    return list(dict.fromkeys(line[:400] for line in lines))[:200]


def main(wanted: dict[str, Any]) -> None:
    began = time.monotonic()
    signal.alarm(TOTAL_SECONDS)
    answer = os.dup(1)
    os.dup2(2, 1)  # stdout carries one line and nothing that a library prints
    # A host without a way to its name servers would wait 10 s for the name of every peer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    report: dict[str, Any] = {
        "rank": wanted["rank"],
        "hostname": socket.gethostname(),
        "addresses": addresses(),
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name in ENVIRONMENT or name.startswith("NCCL_")
        },
    }
    log, wanted["nccl_log"] = tempfile.mkstemp(prefix="prove-nccl-")
    os.close(log)
    layers: dict[str, Layer] = {"ray": ray} if wanted["gcs"] else {}
    layers.update(c10d=c10d, gloo=gloo, queue=queue, nccl=nccl)
    try:
        # Once, for all children. Without a look at CUDA, which no fork survives.
        importlib.import_module("torch.distributed")
        prover = Prover(wanted, layers)
        try:
            report["layers"] = prover.walk()
        finally:
            for child in prover.children.values():
                child.kill()
    except Exception as error:
        report["error"] = first_line(error)
    finally:
        os.unlink(wanted["nccl_log"])
    report["seconds"] = round(time.monotonic() - began, 2)
    os.write(answer, json.dumps(report).encode() + b"\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
