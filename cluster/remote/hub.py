"""Downloads a model once, on the head, with the huggingface_hub that is inside the vLLM image.

Runs in a container of that image, which needs nothing but the cache and a way out:

    docker run --rm -i --name=NAME --network=host --volume=HOST_CACHE:CACHE --entrypoint=python3 \
        IMAGE -c START hub JSON

Standard input: one line with the token (or empty), then this text. So the token is in no argv, no
file, and not in `docker inspect`. Without a line it is HF_TOKEN of the environment, else the hub's
own token file in HF_HOME.

Argument (JSON): repository (ORGANISATION/NAME), cache (the directory with the models--* in it);
and optionally revision (branch, tag or commit; main), endpoint (of a mirror; HF_ENDPOINT of the
environment, else huggingface.co), allow and ignore (lists of fnmatch patterns on paths in the
repository; without ignore, what vLLM does not load is skipped), attempts (in a row without one new
byte; 5), pause (seconds before the second, doubled each time; 2), idle (seconds without a new byte
after which it is given up; 900).

The last line of stdout is one JSON object: {commit, folder (the snapshot, inside the container),
bytes, files, downloaded (bytes, 0 where all was there), seconds}, or {"error": why}; it is left out
where `result` is false. Before it come lines for people. An error is also on stderr. Exit code 0:
all files of that commit are in the cache, and refs/REVISION points to it. 1: not. What is complete
stays, and so do beginnings.

Large files are fetched here, into blobs/SHA256.incomplete, and only linked by the hub: since
huggingface_hub 1.19 an interrupted file starts again from nothing (its issue 4196) and no version
compares the content with the hash that the repository states. The rest is snapshot_download.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

Answer = TypeVar("Answer")

START = (
    "import os, sys; token = sys.stdin.readline().strip(); "
    "token and os.environ.update(HF_TOKEN=token); exec(sys.stdin.read())"
)
"""What python3 -c gets, so that the token can come before the program."""
DEFAULT_ENDPOINT = "https://huggingface.co"
COMMIT = re.compile(r"[0-9a-f]{40}")
NEVER = ("original/*",)
"""Other formats of the weights; vLLM's own LoadConfig.ignore_patterns is original/**/*."""
BESIDE_SAFETENSORS = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.tflite", "*.ot"),
    *("*.onnx", "*.onnx_data", "*.mlmodel", "*.mlpackage/*", "*.nemo", "*.llamafile"),
)
"""vLLM takes *.safetensors where there are any (DefaultModelLoader._prepare_weights)."""
LARGE = 1 << 20
"""Bytes from which on a file is worth to be resumed."""
WORKERS = 8
"""Files at the same time, as huggingface_hub does."""
REPORT_SECONDS = 2
LONGEST_PAUSE = 60
LONGEST_LIMIT = 310
"""Seconds: the hub counts requests in windows of five minutes (hf.co/docs/hub/rate-limits)."""
CHUNK = 1 << 20
LEFTOVER = re.compile(r"([0-9a-f]{40,64})\.[0-9a-f]{8}\.incomplete")
"""What newer versions of huggingface_hub leave when they are killed; no version uses it again."""


class Trouble(Exception):  # noqa: N818 -- it is what a person reads
    """Why there is no model. again: it may pass by itself, after `wait` seconds at least."""

    def __init__(self, text: str, remedy: str = "", again: bool = False, wait: float = 0) -> None:
        super().__init__(f"{text}\n  do: {remedy}" if remedy else text)
        self.text = text
        self.again = again
        self.wait = wait


class File(NamedTuple):
    """A file of a commit, as the hub describes it."""

    path: str
    size: int | None
    """Bytes; some mirrors do not say."""
    blob: str | None
    """Its name in blobs/: the sha256 of a large file, the git id of a small one."""

    @property
    def is_resumable(self) -> bool:
        """True for what is fetched here."""
        return self.blob is not None and len(self.blob) == 64 and (self.size or 0) >= LARGE


Listing = list[File]


class Source:
    """Which model, from where, in which cache; and what to say when it does not come."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.repository: str = wanted["repository"]
        self.revision: str = wanted.get("revision") or "main"
        self.endpoint: str = (
            wanted.get("endpoint") or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
        ).rstrip("/")
        self.cache: str = wanted["cache"]
        self.folder = os.path.join(self.cache, "models--" + self.repository.replace("/", "--"))
        self.has_token = False
        parts = [*self.revision.split("/"), *self.repository.split("/")]
        if not all(parts) or {".", ".."} & set(parts):
            raise Trouble(f"{self.repository!r} at {self.revision!r} is not a name of a model")

    def snapshot(self, commit: str) -> str:
        """The directory of a commit, with the files under their names."""
        return os.path.join(self.folder, "snapshots", commit)

    def blob(self, name: str) -> str:
        """Where content is kept, by its hash."""
        return os.path.join(self.folder, "blobs", name)

    def record(self, commit: str) -> str:
        """Where the list of a commit's files is kept, so that a rerun needs no hub."""
        return os.path.join(self.folder, ".multinode-vllm", f"{commit}.json")

    def ref(self) -> str:
        """The file that says which commit the revision is at."""
        return os.path.join(self.folder, "refs", *self.revision.split("/"))

    @property
    def label(self) -> str:
        """What and where, for messages."""
        return f"{self.repository} at {self.endpoint}"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that led to it."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        link = todo.pop(0)
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            todo += [link.__cause__, link.__context__]
            # urllib3 and requests keep the reason in attributes.
            inner = [*link.args, getattr(link, "reason", None)]
            todo += [each for each in inner if isinstance(each, BaseException)]


def judge(error: BaseException, source: Source) -> Trouble:
    """Say what an exception means.

    By the names of classes: huggingface_hub has come with requests (0.x), httpx (1.x) and httpx2
    (2.x), whose exceptions have nothing else in common.
    """
    if isinstance(error, Trouble):
        return error
    links = list(chain(error))
    names = {cls.__name__ for link in links for cls in type(link).__mro__}
    numbers = {link.errno for link in links if isinstance(link, OSError)}
    text = " ".join(str(link) for link in links)
    return (
        judge_disk(links, numbers, source)
        or judge_answer(links, names, source)
        or judge_network(links, names, numbers, text, source)
        or Trouble(
            f"{source.label}: {type(error).__name__}: {first_line(str(error))}",
            again="Consistency check failed" in text,
        )
    )


def judge_disk(
    links: list[BaseException], numbers: set[int | None], source: Source
) -> Trouble | None:
    """What the cache's disk has answered."""
    if numbers & {errno.ENOSPC, errno.EDQUOT}:
        return Trouble(
            f"{source.cache}: the disk is full ({free_bytes(source.cache):,} bytes free)",
            "make room (tasks/prune.py shows old models and images), or set paths.huggingface",
        )
    # Without a file name it is a connection that a firewall of this host forbids.
    if errno.EROFS in numbers or any(
        isinstance(link, PermissionError) and link.filename for link in links
    ):
        return Trouble(
            f"{source.cache}: no permission to write there, or it is mounted read-only",
            "correct the owner of that directory on the head",
        )
    return None


def judge_answer(links: list[BaseException], names: set[str], source: Source) -> Trouble | None:
    """What the hub has answered."""
    answers = [getattr(link, "response", None) for link in links]
    response = next((answer for answer in answers if answer is not None), None)
    if "HFValidationError" in names:
        return Trouble(
            f"{source.repository!r} is not the name of a model on a hub",
            "write ORGANISATION/NAME, or a directory that begins with /",
        )
    if names & {"JSONDecodeError", "FileMetadataError"}:
        return Trouble(
            f"what answers at {source.endpoint} is not a hub (a mirror that lacks something, or "
            "the login page of a proxy)",
            "check HF_ENDPOINT and the proxy of this network",
        )
    if response is None:
        return None
    status, headers = int(response.status_code), response.headers
    said = headers.get("X-Error-Message") or ""
    code = headers.get("X-Error-Code") or ""
    number = f"HTTP {status}" + (f": {said}" if said else "")
    is_hub = urlsplit(str(response.url)).netloc == urlsplit(source.endpoint).netloc
    token = "secrets: {HF_TOKEN: {env: HF_TOKEN}} in cluster.yaml"  # noqa: S105 -- a hint
    page = f"{source.endpoint}/{source.repository}"
    if status == 401 and "nvalid credentials" in said:
        return Trouble(
            f"{source.label}: the hub does not accept the token in HF_TOKEN ({number})",
            f"make a new one at {source.endpoint}/settings/tokens; it comes from {token}",
        )
    if "GatedRepoError" in names or code == "GatedRepo":
        if not source.has_token:
            return Trouble(
                f"{source.label} is gated, and there is no token ({number})",
                f"accept the licence at {page}, make a token at {source.endpoint}/settings/tokens, "
                f"and name it under {token}",
            )
        return Trouble(
            f"{source.label} is gated, and the account of the token in HF_TOKEN has no access "
            f"({number})",
            f"accept the licence at {page} with that account; a fine-grained token also needs "
            "read access to gated repositories",
        )
    if "RevisionNotFoundError" in names or code == "RevisionNotFound":
        return Trouble(
            f"{source.label} has no branch, tag or commit {source.revision!r} ({number})",
            f"look at {page}/commits/main and correct the revision",
        )
    is_unknown = bool(names & {"RepositoryNotFoundError", "DisabledRepoError"})
    # Without a token the hub says 401 to all of these.
    if is_unknown or code == "RepoNotFound" or (status == 401 and is_hub and not source.has_token):
        who = "the token in HF_TOKEN" if source.has_token else "anyone without a token"
        remedy = "correct model in cluster.yaml; if it is private, "
        remedy += "take a token that may read it" if source.has_token else f"name a token: {token}"
        return Trouble(
            f"{source.endpoint} has no model {source.repository}, or does not show it to {who} "
            f"({number})",
            remedy,
        )
    if status == 429:
        remedy = "wait five minutes and run it again"
        if not source.has_token:
            remedy += f"; with a token the limit is higher: {token}"
        return Trouble(
            f"{source.label}: too many requests from this network or account ({number})",
            remedy,
            again=True,
            wait=pause_wanted(headers),
        )
    if status >= 500 or status == 408 or (status in (401, 403) and not is_hub):
        # A signed address of the storage is valid for an hour; the next attempt gets a new one.
        return Trouble(
            f"{source.label}: {urlsplit(str(response.url)).netloc} answers HTTP {status}",
            "run it again later (status.huggingface.co); what is complete is kept",
            again=True,
        )
    if status in (401, 403):
        has = "the token in HF_TOKEN is not enough" if source.has_token else "there is no token"
        return Trouble(
            f"{source.label}: access is refused, {has} ({number})",
            f"give it the right to read this model; it comes from {token}",
        )
    return Trouble(f"{source.label}: the hub answers {number}")


def pause_wanted(headers: Any) -> float:
    """Seconds that a 429 asks for: Retry-After, or RateLimit: "api";r=0;t=55."""
    found = re.search(r"^\s*(\d+)\s*$", headers.get("Retry-After") or "")
    found = found or re.search(r"\bt=(\d+)", headers.get("RateLimit") or "")
    return min(float(found.group(1)) + 1, LONGEST_LIMIT) if found else 0


def judge_network(
    links: list[BaseException],
    names: set[str],
    numbers: set[int | None],
    text: str,
    source: Source,
) -> Trouble | None:
    """How the hub was not reached."""
    where = source.endpoint
    proxies = sorted(
        name for name in os.environ if re.fullmatch(r"(https?|all)_proxy", name, re.IGNORECASE)
    )
    through = f" through the proxy in {', '.join(proxies)}" if proxies else ""
    way_out = (
        "check HTTPS_PROXY under env in cluster.yaml"
        if proxies
        else "give this host a way to the internet, HTTPS_PROXY or HF_ENDPOINT under env in "
        "cluster.yaml, or bring the model another way (model.source)"
    )
    if "CERTIFICATE_VERIFY_FAILED" in text or "SSLCertVerificationError" in names:
        found = re.search(r"CERTIFICATE_VERIFY_FAILED\]?[^:]*: ([^(\[\"']+)", text)
        reason = found.group(1).strip() if found else "not trusted"
        return Trouble(
            f"{where}: its TLS certificate does not hold: {reason}",
            "check this host's clock (timedatectl); if your network inspects TLS, mount its CA "
            "(container.flags) and name it in SSL_CERT_FILE and REQUESTS_CA_BUNDLE under env",
        )
    if names & {"ProxyError"}:
        return Trouble(f"{where} is not reached{through}: the proxy fails", way_out)
    if any(isinstance(link, socket.gaierror) for link in links) or re.search(
        r"Name or service not known|name resolution|nodename nor servname|No address associated",
        text,
    ):
        host = urlsplit(where).hostname
        return Trouble(
            f"{where} is not reached: no address for the name {host}{through}", way_out, again=True
        )
    if errno.ECONNREFUSED in numbers or "onnection refused" in text:
        return Trouble(f"{where} is not reached{through}: connection refused", way_out, again=True)
    if numbers & {errno.ENETUNREACH, errno.EHOSTUNREACH} or re.search(
        r"unreachable|No route to host", text
    ):
        return Trouble(f"{where} is not reached{through}: no route", way_out, again=True)
    if names & {"TimeoutException", "Timeout", "TimeoutError", "timeout"}:
        return Trouble(f"{where} does not answer in time{through}", way_out, again=True)
    if "OfflineModeIsEnabled" in names:
        return Trouble("huggingface_hub is offline (HF_HUB_OFFLINE)", "take it out of env")
    broken = {"ConnectionError", "NetworkError", "ProtocolError", "TransportError", "SSLError"}
    if names & (broken | {"ChunkedEncodingError", "IncompleteRead"}):
        reason = first_line(str(links[-1])) or type(links[-1]).__name__
        return Trouble(
            f"{where}: the connection broke{through}: {reason}",
            "run it again; what is complete is kept",
            again=True,
        )
    return None


def first_line(text: str) -> str:
    """The first line that says something, without the query of a signed address."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"\?\S+", "", lines[0])[:300] if lines else ""


def say(line: str) -> None:
    print(line, flush=True)


def amount(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def free_bytes(path: str) -> int:
    """Free space where `path` is or would be."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def write(path: str, text: str) -> None:
    """Write a small file in one step."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    with os.fdopen(descriptor, "w") as stream:
        os.fchmod(descriptor, 0o644)
        stream.write(text)
    os.replace(temporary, path)


def read_listing(source: Source, commit: str) -> Listing | None:
    """What was written down of a commit when the hub could be asked."""
    try:
        with open(source.record(commit)) as stream:
            return [File(*row) for row in json.load(stream)]
    except (OSError, ValueError, TypeError):
        return None


def read_ref(source: Source) -> str | None:
    """The commit that the revision was at last time."""
    try:
        with open(source.ref()) as stream:
            found = stream.read().strip()
    except OSError:
        return None
    return found if COMMIT.fullmatch(found) else None


def deduce(source: Source, commit: str) -> Listing | None:
    """The files of a snapshot that somebody else has downloaded, if it holds a whole model.

    Whole: there is a config, all shards that an index names are there, and each has the length that
    its own header states.
    """
    root = source.snapshot(commit)
    paths = [
        os.path.relpath(os.path.join(folder, name), root)
        for folder, _, names in os.walk(root)
        for name in names
    ]
    shards = {path for path in paths if path.endswith(".safetensors")}
    try:
        for path in paths:
            if path.endswith(".safetensors.index.json"):
                with open(os.path.join(root, path)) as stream:
                    places = set(json.load(stream)["weight_map"].values())
                shards |= {os.path.join(os.path.dirname(path), place) for place in places}
        if not shards or not {"config.json", "params.json"} & set(paths):
            return None
        if any(stated_size(os.path.join(root, path)) is None for path in shards):
            return None
        return [File(path, os.stat(os.path.join(root, path)).st_size, None) for path in paths]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def stated_size(path: str) -> int | None:
    """The length of a safetensors file in bytes, where it is as long as its header says."""
    size = os.stat(path).st_size
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 + length or length > 100 << 20:
            return None
        header = json.loads(stream.read(length))
    ends = [row["data_offsets"][1] for key, row in header.items() if key != "__metadata__"]
    return size if size == 8 + length + max(ends, default=0) else None


def selected(listing: Listing, wanted: dict[str, Any], keep: Callable[..., Any]) -> Listing:
    """The files to have. `keep` is huggingface_hub.utils.filter_repo_objects."""
    ignore = wanted.get("ignore")
    if ignore is None:
        top = [file.path for file in listing if "/" not in file.path]
        has_safetensors = any(
            path.endswith((".safetensors", ".safetensors.index.json")) for path in top
        )
        ignore = [*NEVER, *(BESIDE_SAFETENSORS if has_safetensors else ())]
    return list(
        keep(
            listing,
            allow_patterns=wanted.get("allow"),
            ignore_patterns=ignore,
            key=lambda file: file.path,
        )
    )


def lacking(source: Source, commit: str, files: Listing) -> Listing:
    """The files that a snapshot does not have, or not in full length."""
    return [
        file
        for file in files
        if not is_whole(os.path.join(source.snapshot(commit), file.path), file)
    ]


def is_whole(path: str, file: File) -> bool:
    try:
        return file.size in (None, os.stat(path).st_size)
    except OSError:
        return False


def mend(source: Source, commit: str, files: Listing) -> None:
    """Remove what is shorter or longer than it should be: the hub takes whatever has the name."""
    for file in files:
        link = os.path.join(source.snapshot(commit), file.path)
        blob = source.blob(file.blob) if file.blob else None
        for path in (link, blob):
            if path and os.path.lexists(path) and not is_whole(path, file):
                say(f"{file.path} is damaged in the cache; it is downloaded again")
                os.unlink(path)


def sweep(source: Source) -> None:
    """Remove beginnings that nobody can continue and nobody is writing."""
    try:
        names = os.listdir(source.blob(""))
    except OSError:
        return
    for name in names:
        found = LEFTOVER.fullmatch(name)
        if found is None:
            continue
        lock = os.path.join(
            source.cache, ".locks", os.path.basename(source.folder), found.group(1) + ".lock"
        )
        try:
            with open(lock, "a") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                size = os.stat(source.blob(name)).st_size
                os.unlink(source.blob(name))
        except OSError:
            continue
        say(f"removed {amount(size)} that an interrupted download has left")


class Download:
    """One run: resolves, fetches, reports."""

    def __init__(self, hub: Any, source: Source, wanted: dict[str, Any]) -> None:
        self.hub, self.source, self.wanted = hub, source, wanted
        self.api = hub.HfApi(endpoint=source.endpoint)
        self.utils = importlib.import_module("huggingface_hub.utils")
        self.file_download = importlib.import_module("huggingface_hub.file_download")
        # Its own 10 MiB are what a broken connection loses.
        hub.constants.DOWNLOAD_CHUNK_SIZE = CHUNK
        self.attempts = int(wanted.get("attempts") or 5)
        self.pause = float(wanted.get("pause") or 2)
        self.missing: Listing = []
        self.patient_until = 0.0
        """Monotonic: an attempt waits until then on purpose."""

    def run(self) -> dict[str, Any]:
        """Return what main prints. Raises Trouble."""
        began, source = time.monotonic(), self.source
        commit, listing = self.resolve()
        files = selected(listing, self.wanted, self.utils.filter_repo_objects)
        if not files:
            raise Trouble(
                f"{source.label}: no file is left of its {len(listing)}",
                "correct the patterns (allow, ignore)",
            )
        total = sum(file.size or 0 for file in files)
        self.missing = lacking(source, commit, files)
        before = self.have()
        if self.missing:
            mend(source, commit, self.missing)
            sweep(source)
            before = self.have()
            self.check_disk(before)
            say(
                f"{source.repository} {commit[:12]}: {len(self.missing)} of {len(files)} files to "
                f"download, {amount(self.size() - before)} of {amount(total)}"
            )
            self.follow(lambda: self.fetch(commit, len(files) < len(listing)))
            left = lacking(source, commit, files)
            if left:
                names = ", ".join(file.path for file in left[:5])
                raise Trouble(
                    f"{source.label}: {len(left)} of {len(files)} files are not complete: {names}",
                    "run it again",
                )
        if not COMMIT.fullmatch(source.revision) and read_ref(source) != commit:
            write(source.ref(), commit)
        return {
            "commit": commit,
            "folder": source.snapshot(commit),
            "bytes": total,
            "files": len(files),
            "downloaded": self.size() - before if self.missing else 0,
            "seconds": round(time.monotonic() - began, 2),
        }

    def resolve(self) -> tuple[str, Listing]:
        """The commit of the revision, and its files. Asks the hub only if the cache cannot tell."""
        source, commit = self.source, None
        if COMMIT.fullmatch(source.revision):
            commit = source.revision
            listing = read_listing(source, commit)
            if listing is not None:
                return commit, listing
        commit = commit or read_ref(source)
        kept = (read_listing(source, commit) or deduce(source, commit)) if commit else None
        if kept is not None and commit is not None:
            files = selected(kept, self.wanted, self.utils.filter_repo_objects)
            kept = None if lacking(source, commit, files) else kept
        try:
            # What is here already is worth no long wait.
            info = self.retried(self.ask, lambda: 0, 1 if kept else self.attempts)
        except Trouble as trouble:
            if kept is None or commit is None:
                raise
            say(f"{trouble.text}; {commit[:12]} is in the cache and complete, so that is taken")
            return commit, kept
        listing = [describe(sibling) for sibling in info.siblings or []]
        for file in listing:
            if os.path.isabs(file.path) or ".." in file.path.split("/"):
                raise Trouble(f"{source.label} names a file outside of itself: {file.path!r}")
        write(source.record(info.sha), json.dumps(listing))
        return str(info.sha), listing

    def ask(self) -> Any:
        """What the hub says of the revision."""
        return self.api.model_info(
            self.source.repository, revision=self.source.revision, files_metadata=True, timeout=30
        )

    def retried(
        self, action: Callable[[], Answer], have: Callable[[], int], attempts: int
    ) -> Answer:
        """Do something that may fail for a while; failures count that brought no byte (have)."""
        failures, pause, had = 0, self.pause, -1
        while True:
            try:
                return action()
            except Exception as error:
                trouble, now = judge(error, self.source), have()
                failures, had = (failures + 1 if now <= had else 1), max(had, now)
                if not trouble.again or failures >= attempts:
                    raise trouble from error
                wait = max(trouble.wait, min(pause * 2 ** (failures - 1), LONGEST_PAUSE))
                say(f"{trouble.text}; again in {wait:.0f} s ({failures} of {attempts})")
                self.patient_until = time.monotonic() + wait
                time.sleep(wait)

    def size(self) -> int:
        """Bytes of what was not there at the start; the same content counts once."""
        blobs = {file.blob or file.path: file.size or 0 for file in self.missing}
        return sum(blobs.values())

    def have(self) -> int:
        """Bytes of these that are on the disk by now, beginnings included."""
        begun: dict[str, int] = {}
        try:
            with os.scandir(self.source.blob("")) as entries:
                for entry in entries:
                    # A name may be gone again: the hub renames what is complete.
                    try:
                        found = entry.stat()
                    except OSError:
                        continue
                    is_begun = entry.name.endswith(".incomplete")
                    blob = entry.name.partition(".")[0]
                    # Some writers give a file its full length at once.
                    size = min(found.st_size, found.st_blocks * 512) if is_begun else found.st_size
                    begun[blob] = max(begun.get(blob, 0), size)
        except OSError:
            return 0
        blobs = {file.blob: file.size or 0 for file in self.missing if file.blob}
        return sum(min(size, begun.get(blob, 0)) for blob, size in blobs.items())

    def check_disk(self, have: int) -> None:
        """Raise Trouble where what is missing does not fit."""
        need, free = self.size() - have, free_bytes(self.source.cache)
        if need > free:
            raise Trouble(
                f"{self.source.cache} has no room for {self.source.repository}: it needs {need:,} "
                f"bytes ({amount(need)}) more, and {free:,} ({amount(free)}) are free",
                "make room (tasks/prune.py shows old models and images), or set paths.huggingface",
            )

    def follow(self, work: Callable[[], None]) -> None:
        """Run `work` and report how it gets on. Raises Trouble."""
        failed: list[BaseException] = []

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        first = self.have()
        began = moved = reported = time.monotonic()
        last, total = first, self.size()
        idle = float(self.wanted.get("idle") or 900)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            now, have = time.monotonic(), self.have()
            if have != last:
                last, moved = have, now
            moved = max(moved, min(now, self.patient_until))
            if now - moved > idle:
                raise Trouble(
                    f"{self.source.label}: not one byte in {idle:.0f} s, at {amount(have)} of "
                    f"{amount(total)}",
                    "run it again; what is complete is kept",
                )
            if now - reported >= REPORT_SECONDS:
                reported = now
                rate = (have - first) / (now - began)
                left = f", {clock((total - have) / rate)} left" if rate > 0 else ""
                say(f"{amount(have)} of {amount(total)}, {amount(rate)}/s{left}")
        for error in failed:
            raise judge(error, self.source) from error

    def fetch(self, commit: str, is_partial: bool) -> None:
        """Bring everything; is_partial: files of the repository are left out on purpose."""
        source = self.source
        os.makedirs(source.blob(""), exist_ok=True)
        limit = getattr(self.hub.constants, "MAX_HTTP_DOWNLOAD_SIZE", 50_000_000_000)
        large = {
            str(file.blob): file
            for file in self.missing
            if file.is_resumable and (file.size or 0) <= limit
        }
        # The largest first, so that the last one does not run alone for long.
        order = sorted(large.values(), key=lambda file: -(file.size or 0))
        pool = ThreadPoolExecutor(WORKERS)
        jobs = [pool.submit(self.resume_patiently, commit, file) for file in order]
        try:
            for job in jobs:
                job.result()
        finally:
            # Not waiting: after an error the others need not get to their end.
            pool.shutdown(wait=False, cancel_futures=True)
        if any((file.size or 0) > limit for file in self.missing):
            # Plain HTTP ends at 50 GB a file; Xet, which the real hub has, does not.
            self.hub.constants.HF_HUB_DISABLE_XET = source.endpoint != DEFAULT_ENDPOINT
        self.retried(lambda: self.rest(commit), self.have, self.attempts)
        if is_partial:
            # Newer versions keep the list of all files here, and offline they refuse a snapshot
            # that has not all of them (IncompleteSnapshotError), as vLLM's get_model_path asks.
            try:
                os.unlink(os.path.join(source.folder, "trees", f"{commit}.json"))
            except OSError:
                pass

    def rest(self, commit: str) -> None:
        """Have the hub bring what is still missing, and link all of it."""
        self.api.snapshot_download(
            self.source.repository,
            revision=commit,
            cache_dir=self.source.cache,
            allow_patterns=[glob.escape(file.path) for file in self.missing],
            max_workers=WORKERS,
        )

    def resume_patiently(self, commit: str, file: File) -> None:
        """Bring one large file over as many broken connections as it takes."""
        partial = self.source.blob(f"{file.blob}.incomplete")

        def have() -> int:
            try:
                return os.stat(partial).st_size
            except OSError:
                return 0

        self.retried(lambda: self.resume(commit, file), have, self.attempts)

    def resume(self, commit: str, file: File) -> None:
        """Bring one large file into blobs/, from where the last attempt got to."""
        source = self.source
        blob = source.blob(str(file.blob))
        partial = f"{blob}.incomplete"
        folder = os.path.basename(source.folder)
        lock = os.path.join(source.cache, ".locks", folder, f"{file.blob}.lock")
        os.makedirs(os.path.dirname(lock), exist_ok=True)
        # The hub's own lock: another process may download the same.
        with self.utils.WeakFileLock(lock):
            if os.path.exists(blob):
                return
            url = self.hub.hf_hub_url(
                source.repository, file.path, revision=commit, endpoint=source.endpoint
            )
            found = self.api.get_hf_file_metadata(url=url, timeout=30)
            if found.etag != file.blob:
                return  # a mirror with names of its own; the hub's code takes them as they are
            headers = self.utils.build_hf_headers()
            if urlsplit(found.location).netloc != urlsplit(url).netloc:
                headers.pop("authorization", None)  # the storage has a signed address instead
            with open(partial, "ab") as stream:
                if stream.tell() > (file.size or 0):
                    stream.truncate(0)
                if stream.tell() < (file.size or 0):
                    self.file_download.http_get(
                        found.location,
                        stream,
                        resume_size=stream.tell(),
                        headers=headers,
                        expected_size=file.size,
                    )
            if digest(partial) != file.blob:
                os.unlink(partial)
                raise Trouble(
                    f"{source.label}: {file.path} arrived with another sha256 than the hub states",
                    "run it again; a proxy or mirror on the way may keep an old or broken copy",
                    again=True,
                )
            os.chmod(partial, 0o644)
            os.replace(partial, blob)


def digest(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
        if minutes >= 60
        else f"{minutes}:{rest:02d}"
    )


def describe(sibling: Any) -> File:
    """A file as HfApi.model_info(files_metadata=True) gives it."""
    if sibling.lfs is None:
        return File(sibling.rfilename, sibling.size, sibling.blob_id)
    return File(sibling.rfilename, sibling.lfs.size, sibling.lfs.sha256)


def settle(source: Source) -> None:
    """What huggingface_hub reads when it is imported."""
    os.environ.update(
        HF_ENDPOINT=source.endpoint,
        HF_HUB_OFFLINE="0",
        TRANSFORMERS_OFFLINE="0",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HUB_VERBOSITY="error",  # its warnings show signed addresses
        HF_HUB_ENABLE_HF_TRANSFER="0",  # set in some images; it cannot resume
        HF_HUB_DOWNLOAD_TIMEOUT="30",
        HF_HUB_ETAG_TIMEOUT="30",
        # Plain HTTP resumes and stays with the mirror that the user has named; Xet does neither,
        # and needs further hosts to be reachable.
        HF_HUB_DISABLE_XET="1",
        # Newer versions would put the blobs beside the models and link to them.
        HF_HUB_DISABLE_SHARED_BLOBS="1",
    )
    warnings.simplefilter("ignore")


def stopped(number: int, frame: object) -> None:  # noqa: ARG001
    print("\nstopped; what is complete is kept", file=sys.stderr, flush=True)
    os._exit(128 + number)


def main(wanted: dict[str, Any]) -> int:
    """Do it and print the result. Returns the exit code."""
    # As process 1 of a container it would not even notice that it is asked to stop.
    signal.signal(signal.SIGTERM, stopped)
    signal.signal(signal.SIGINT, stopped)
    found: dict[str, Any]
    try:
        source = Source(wanted)
        settle(source)
        try:
            hub = importlib.import_module("huggingface_hub")
        except ImportError as error:
            raise Trouble(f"there is no huggingface_hub in this image: {error}") from error
        source.has_token = bool(hub.get_token())
        try:
            found = Download(hub, source, wanted).run()
        except OSError as error:
            raise judge(error, source) from error
    except Trouble as trouble:
        found = {"error": str(trouble)}
        print(trouble, file=sys.stderr, flush=True)
    if wanted.get("result", True):
        say(json.dumps(found))
    return 1 if "error" in found else 0


if __name__ == "__main__":
    code = main(json.loads(sys.argv[2]))
    # Threads that still wait for a peer must not keep it open.
    os._exit(code)
