"""An image from its registry."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import http.client
import ipaddress
import json
import os
import re
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Dict, List, Tuple

from cluster.remote.registry.source import (
    DOCKER_HUB,
    INDEXES,
    MANIFEST_BYTES,
    Blob,
    ImageError,
    Reference,
    Source,
    docker,
)
from cluster.remote.wire import BUFFER, why

HUB_KEY = "https://index.docker.io/v1/"
"""Under which `docker login` keeps what Docker Hub wants."""
MANIFESTS = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    *INDEXES,
)
ATTEMPTS = 5
"""At a file of the registry, in a row without a new byte."""
OUTSIDE_SECONDS = 30
"""Without a byte from the registry, until it is tried again."""


class UnreachableError(ImageError):
    """There was no answer at all; another address may give one."""


class Registry(Source):
    """A real registry, read as Docker reads it: its login, its mirrors, its certificates."""

    def __init__(self, reference: Reference, cache: str) -> None:
        super().__init__(reference, cache)
        information = json.loads(docker("info", "--format", "{{json .}}") or "{}")
        configuration = information.get("RegistryConfig") or {}
        self.is_checked = is_secure(reference.host, configuration)
        self.bases = bases(reference.host, configuration)
        for name in ("HttpProxy", "HttpsProxy", "NoProxy"):
            # Docker's own way out; its passwords are shown as xxxxx, then ours has to do.
            value = information.get(name)
            if value and "xxxxx" not in value:
                os.environ[name.replace("P", "_p").lower()] = value
        self.base = self.bases[0]
        self.user, self.login_state = "", ""
        self.authorization: Dict[str, str] = {}

    def resolve(self) -> str:
        """Ask the registry, or the first of its mirrors that knows the image."""
        return self.fetch_manifest(self.reference.what, self.bases)

    def prepare(self, digest: str) -> None:
        """Fetch its manifest; raises ImageError."""
        self.manifest(digest)

    def manifest(self, digest: str) -> Tuple[bytes, str] | None:
        """Fetch a manifest of this image, once."""
        with self.lock:
            if digest not in self.manifests:
                is_first = not self.manifests
                if not is_first and digest not in self.children:
                    return None
                got = self.fetch_manifest(digest, self.bases if is_first else [self.base])
                if got != digest:
                    raise ImageError(
                        "%s sends something else under %s: a proxy or a fault on the way"
                        % (self.base, digest)
                    )
            return self.manifests[digest]

    def fetch_manifest(self, what: str, bases: List[str]) -> str:
        """Fetch, learn, and stay with the address that had it; return its digest."""
        for base in bases:
            self.base = base
            try:
                with self.open("manifests/" + what, {"Accept": ", ".join(MANIFESTS)}) as answer:
                    body, kind = answer.read(MANIFEST_BYTES), answer.headers.get_content_type()
                if kind not in MANIFESTS:
                    raise ImageError(
                        "%s has %s only in a format that is too old (%s): push it again"
                        % (base, what, kind)
                    )
                return self.learn(body, kind)
            except ImageError as error:
                is_mirror = self.reference.host == DOCKER_HUB[0] and base != self.bases[-1]
                if base == bases[-1] or not (is_mirror or isinstance(error, UnreachableError)):
                    raise
            except (OSError, http.client.HTTPException) as error:
                if base == bases[-1]:
                    raise UnreachableError(
                        "%s breaks the connection off: %s" % (base, error)
                    ) from None
        raise AssertionError("there is always a last address")

    def blob(self, digest: str) -> Blob | None:
        """A blob of this image; the first who asks has it fetched."""
        with self.lock:
            blob = self.blobs.get(digest)
            if blob is not None and not blob.is_asked:
                blob.is_asked = True
                threading.Thread(target=self.fetch, args=(blob,), daemon=True).start()
            return blob

    def fetch(self, blob: Blob) -> None:
        """Bring a blob into the cache, in several attempts if need be."""
        path = os.path.join(self.cache, blob.digest[7:])
        try:
            self.fetch_into(blob, path)
        except ImageError as error:
            self.error = self.error or error
            blob.fail(error)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = ImageError(
                "the head's disk is full at %s: make room, or set another cache" % self.cache
                if full
                else "the head cannot write to %s: %s" % (self.cache, why(error))
            )
            if full:
                with contextlib.suppress(OSError):
                    os.unlink(path + ".part")
            self.error = self.error or reason
            blob.fail(reason)

    def fetch_into(self, blob: Blob, path: str) -> None:
        """Fetch what is missing behind what an earlier run has left."""
        is_whole = os.path.exists(path)
        file = os.open(path if is_whole else path + ".part", os.O_RDWR | os.O_CREAT, 0o600)
        digest, have = hashlib.sha256(), 0
        while True:
            chunk = os.pread(file, 1 << 20, have)
            if not chunk:
                break
            digest.update(chunk)
            have += len(chunk)
        if have > blob.size or (have == blob.size and digest.hexdigest() != blob.digest[7:]):
            os.ftruncate(file, 0)
            digest, have = hashlib.sha256(), 0
        blob.file = file
        blob.grow(have)
        failures = 0
        while blob.ready < blob.size:
            before = blob.ready
            try:
                self.fetch_rest(blob, digest)
                if blob.ready < blob.size:
                    raise http.client.IncompleteRead(b"")
            except (OSError, http.client.HTTPException, UnreachableError) as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                failures = 1 if blob.ready > before else failures + 1
                if failures >= ATTEMPTS:
                    if isinstance(error, ImageError):
                        raise
                    raise UnreachableError(
                        "%s breaks off again and again in the middle of a layer (%s); what came "
                        "is kept: run it again" % (self.base, error or type(error).__name__)
                    ) from None
                time.sleep(min(8, 0.5 * 2**failures))
        if digest.hexdigest() != blob.digest[7:]:
            os.unlink(path if is_whole else path + ".part")
            raise ImageError(
                "what %s sends under %s has another sha256: a proxy or a fault on the way, or a "
                "damaged registry; run it again" % (self.base, blob.digest)
            )
        if not is_whole:
            os.rename(path + ".part", path)

    def fetch_rest(self, blob: Blob, digest: Any) -> None:
        """One attempt: from where it is to where the connection ends."""
        headers = {"Range": "bytes=%d-" % blob.ready} if blob.ready else {}
        with self.open("blobs/" + blob.digest, headers) as answer:
            skip = 0 if answer.status == 206 else blob.ready
            while blob.ready < blob.size:
                data = answer.read(min(BUFFER, blob.size - blob.ready + skip))
                if not data:
                    return
                data, skip = data[skip:], max(0, skip - len(data))
                digest.update(data)
                view, at = memoryview(data), blob.ready
                while len(view):
                    count = os.pwrite(blob.file, view, at)
                    view, at = view[count:], at + count
                with self.lock:
                    self.downloaded += len(data)
                blob.grow(len(data))

    # How a registry is asked.

    def open(self, path: str, headers: Dict[str, str]) -> Any:
        """GET, with a login where one is asked for. Raises ImageError, UnreachableError."""
        url = "%s/v2/%s/%s" % (self.base, self.reference.repository, path)
        for attempt in (1, 2):
            request = urllib.request.Request(url, headers=headers)
            used = self.authorization.get(self.base, "")
            if used:  # not for the storage that a registry redirects to
                request.add_unredirected_header("Authorization", used)
            try:
                return self.ask(request)
            except urllib.error.HTTPError as error:
                error.close()
                challenges = error.headers.get_all("WWW-Authenticate") or []
                if error.code == 401 and attempt == 1 and challenges:
                    self.log_in(challenges)
                    continue
                raise self.refusal(error, path) from None
        raise AssertionError("the second attempt returns or raises")

    def ask(self, request: urllib.request.Request) -> Any:
        """Send one request. Raises HTTPError for an answer, UnreachableError for none."""
        host = urllib.parse.urlsplit(request.full_url).netloc
        context = tls(host, self.is_checked)
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
        try:
            return opener.open(request, timeout=OUTSIDE_SECONDS)
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError as error:
            raise UnreachableError(unreachable(host, error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(unreachable(host, error)) from None

    def log_in(self, challenges: List[str]) -> None:
        """Answer WWW-Authenticate with what `docker login` has left on this host, if anything."""
        host = urllib.parse.urlsplit(self.base).netloc
        user, password, refresh, self.login_state = credentials(host)
        self.user = user
        basic = ""
        if user and password:
            text = ("%s:%s" % (user, password)).encode()
            basic = "Basic " + base64.b64encode(text).decode()
        bearer = next((each for each in challenges if each.lower().startswith("bearer")), None)
        if bearer is None:
            self.authorization[self.base] = basic
            return
        fields = dict(re.findall(r'(\w+)="([^"]*)"', bearer))
        scope = fields.get("scope") or "repository:%s:pull" % self.reference.repository
        query = {"service": fields.get("service", ""), "scope": scope}
        realm, data = fields.get("realm", ""), None
        if refresh:
            query.update(grant_type="refresh_token", refresh_token=refresh, client_id="docker")
            data = urllib.parse.urlencode(query).encode()
        else:
            mark = "&" if "?" in realm else "?"
            realm += mark + urllib.parse.urlencode(query)
        request = urllib.request.Request(realm, data=data)
        if basic and not refresh:
            request.add_unredirected_header("Authorization", basic)
        try:
            with self.ask(request) as answer:
                found = json.loads(answer.read(MANIFEST_BYTES))
            token = found.get("token") or found["access_token"]
        except urllib.error.HTTPError as error:
            error.close()
            raise self.refusal(error, "") from None
        except (ValueError, KeyError, TypeError):
            raise ImageError("%s gives no token" % fields.get("realm")) from None
        self.authorization[self.base] = "Bearer " + token

    def refusal(self, error: urllib.error.HTTPError, path: str) -> ImageError:
        """What an answer other than 200 means, and what to do."""
        host, name = urllib.parse.urlsplit(self.base).netloc, self.reference.repository
        shown = DOCKER_HUB[0] if self.reference.host == DOCKER_HUB[0] else host
        code = error.code
        if code in (401, 403):
            to = "" if shown == DOCKER_HUB[0] else " " + shown
            text = (
                "%s does not let the head read %s (%d): it is private, or does not exist. As the "
                "user that this runs as on the head, run: docker login%s (%s)"
            )
            return ImageError(text % (shown, name, code, to, self.login_state or "no login"), code)
        if code == 404:
            return ImageError(
                "%s has no %s of %s (404): is image in cluster.yaml right?"
                % (shown, path.partition("/")[2] or "such thing", name),
                code,
            )
        if code == 429:
            after = error.headers.get("Retry-After")
            return ImageError(
                "%s gives no more now: its limit of pulls is reached (429) for %s. Wait%s, or run "
                "docker login on the head with an account that may pull more"
                % (
                    shown,
                    self.user or "everyone without a login at this address",
                    " %s s" % after if after else "",
                ),
                code,
            )
        if code >= 500:
            return UnreachableError("%s is out of order (%d): try again later" % (shown, code))
        return ImageError("%s answers %d to %s of %s" % (shown, code, path, name))


def bases(host: str, configuration: Dict[str, Any]) -> List[str]:
    """Where Docker on this host would look for a registry, in its order, from `docker info`."""
    if host == DOCKER_HUB[0]:
        mirrors = [str(each).rstrip("/") for each in configuration.get("Mirrors") or []]
        return [*mirrors, "https://registry-1.docker.io"]
    if is_secure(host, configuration):
        return ["https://" + host]
    return ["https://" + host, "http://" + host]


def is_secure(host: str, configuration: Dict[str, Any]) -> bool:
    """Whether Docker on this host insists on TLS and a certificate that it trusts."""
    index = (configuration.get("IndexConfigs") or {}).get(host)
    if index is not None:
        return bool(index.get("Secure", True))
    return not is_within(host, configuration.get("InsecureRegistryCIDRs") or [])


def is_within(host: str, networks: List[str]) -> bool:
    """Whether any address of a host lies in networks where Docker accepts plain http."""
    try:
        found = socket.getaddrinfo(host.rpartition(":")[0] or host, None, type=socket.SOCK_STREAM)
        addresses = {ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found}
    except (OSError, ValueError):
        return False
    return any(one in ipaddress.ip_network(net) for one in addresses for net in networks)


def tls(host: str, is_checked: bool) -> ssl.SSLContext:
    """How a registry proves who it is: the system's authorities, and Docker's for this host."""
    context = ssl.create_default_context()
    folder = os.path.join("/etc/docker/certs.d", host)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    for name in names:
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if name.endswith(".crt"):
                context.load_verify_locations(path)
            elif name.endswith(".cert"):
                context.load_cert_chain(path, path[: -len("cert")] + "key")
    if not is_checked:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def unreachable(host: str, reason: Any) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return (
            "the head does not trust the certificate of %s (%s): put the authority's certificate "
            "into /etc/docker/certs.d/%s/ca.crt there" % (host, reason.verify_message, host)
        )
    if isinstance(reason, ssl.SSLError):
        return (
            "%s does not speak TLS (%s): if it is a plain-http registry, name it under "
            "insecure-registries in the head's /etc/docker/daemon.json" % (host, reason.reason)
        )
    if isinstance(reason, socket.gaierror):
        return "the head cannot resolve the name %s: %s" % (host, why(reason))
    if isinstance(reason, socket.timeout):
        reason = "no answer within %d s: a firewall, or a proxy is needed" % OUTSIDE_SECONDS
    return "the head cannot reach the registry %s: %s" % (host, reason)


def credentials(host: str) -> Tuple[str, str, str, str]:
    """Return (user, password, refresh token, where it was looked for) from docker login."""
    key = HUB_KEY if host == "registry-1.docker.io" else host
    folder = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        helper = (config.get("credHelpers") or {}).get(key) or config.get("credsStore")
        if helper:
            done = subprocess.run(
                ("docker-credential-" + helper, "get"), input=key.encode(), stdout=-1, stderr=-1
            )
            if done.returncode == 0:
                found = json.loads(done.stdout)
                user, secret = str(found["Username"]), str(found["Secret"])
                state = "the login of %s in %s was refused" % (user, helper)
                return ("", "", secret, state) if user == "<token>" else (user, secret, "", state)
        entry = (config.get("auths") or {}).get(key) or {}
        text = base64.b64decode(entry.get("auth") or "").decode()
        user, _, password = text.partition(":")
        refresh = str(entry.get("identitytoken") or "")
    except FileNotFoundError:
        return "", "", "", "there is no %s" % path
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return "", "", "", "%s cannot be used: %s" % (path, error)
    if not user and not refresh:
        return "", "", "", "%s has no login for it" % path
    return user, password, refresh, "the login of %s in %s was refused" % (user or "it", path)
