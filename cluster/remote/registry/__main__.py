"""Gives hosts that have only the fabric their image from the head, with Docker's own pull.

Started like every program of remote/: `python3 - registry JSON`, its text over stdin. Roles:

resolve   On the head, first: what does the reference mean now? Keys: image (reference); archive
          (path of a `docker save` file: plain, .gz, .xz, .zst) or local (true: from the head's own
          Docker) instead of the registry; cache (directory, default CACHE). Result: digest (of the
          manifest or the index: the one that all hosts use), bytes (of all blobs; null for an
          index), seconds.
serve     On the head. A read-only registry of this one image: what is asked for is fetched once for
          all hosts, into `cache`, and given to each while it still comes. Keys: as for resolve;
          digest; tag (reference with a tag: the name that the image gets; null: no pull on the head
          itself); address (ours on the fabric, all that it binds beside 127.0.0.1), ports (the
          first free one is taken), receivers [{name, address}], patience, stall. Ends when every
          receiver is done, failed, or absent for `patience` seconds. Result: digest, id (Docker's,
          here), downloaded, served (bytes), receivers {name: {state (done, failed, absent),
          reason}}, kept (bytes in `cache`, because a receiver did not finish), seconds.
receive   On every other host, at the same time. Keys: image, digest, tag; name (ours), index (ours
          in the list of receivers), source (our fabric address), sender (the head's name), address,
          ports, patience, stall. Result: digest, id, received (bytes over the fabric), seconds.

Defaults: patience 60, stall 20 (seconds; without any sign of life the other side is given up). The
last line of stdout is one JSON object: the result, with cpu_seconds and peak_bytes, or {"error":
why}; it is left out where `result` is false. Before it come lines for people. An error is also on
stderr. Exit code 0: the image is here, under its name, complete. 1: it is not, and nothing
half-loaded has that name.

A receiver listens on its own 127.0.0.1, where Docker accepts plain http without any configuration,
takes connections from root and its own user only, and passes them on to the head. Docker pulls
127.0.0.1:PORT/REPOSITORY@DIGEST: only layers that it lacks, several at a time, each against its
sha256. The result is tagged with the real name, and the temporary name is removed.

An archive is served as a registry too, with its layers as they lie in the file, to the head as
well: so all hosts run the same pull and have the same id.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, Dict

from cluster.remote.registry.archive import Archive, docker_save
from cluster.remote.registry.endpoint import serve
from cluster.remote.registry.receiver import receive
from cluster.remote.registry.source import (
    CACHE,
    INDEXES,
    ImageError,
    Reference,
    Source,
    docker,
    own_directory,
)
from cluster.remote.registry.upstream import Registry
from cluster.remote.wire import Role, run


def open_source(wanted: Dict[str, Any]) -> Source:
    """Where the image comes from; makes the cache directory. Raises ImageError."""
    image, cache = wanted["image"], own_directory(wanted.get("cache") or CACHE)
    if wanted.get("archive"):
        return Archive(image, cache, wanted["archive"])
    if wanted.get("local"):
        identity = docker("image", "inspect", "--format", "{{.Id}}", image)
        path = os.path.join(cache, "saved.tar." + identity[7:])
        if not os.path.exists(path):
            docker_save(image, path)
        return Archive(image, cache, path)
    return Registry(Reference.parse(image), cache)


def resolve(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Role resolve."""
    source = open_source(wanted)
    digest = source.resolve()
    is_index = source.manifests[digest][1] in INDEXES
    size = None if is_index else sum(blob.size for blob in source.blobs.values())
    return {"digest": digest, "bytes": size}


ROLES: Dict[str, Role] = {
    "resolve": resolve,
    "serve": lambda wanted: serve(wanted, open_source(wanted)),
    "receive": receive,
}
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def stop(number: int, frame: Any) -> None:
    """Have a signal end this program through every `finally`, once."""
    del frame
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)
    raise ImageError("stopped by signal %d" % number)


if __name__ == "__main__":
    for each in ENDS:
        signal.signal(each, stop)
    sys.exit(run(ROLES, ("serve", "receive"), json.loads(sys.argv[2])))
