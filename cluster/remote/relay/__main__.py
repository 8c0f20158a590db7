"""Brings a directory (a model) from one host to others over the fabric, and proves that it arrived.

Started like every program of remote/: `python3 - relay JSON`, its text over stdin. Roles:

manifest  On the source. Lists `root` with the sha256 of every piece of every file, into a small
          file beside the root, which is also the cache: a second run reads no data. Keys: root;
          manifest (path of that file; default ROOT.manifest.json), only ([path in root]; what
          links in there point to comes along), exclude ([fnmatch pattern]), drop_cache. Result:
          digest (identifies all of it), files, links, bytes, hashed (bytes read), seconds, path.
check     On a receiver: does `root` hold what its saved manifest says? Keys: root, manifest; digest
          (what the source has: {"state": "stale"} if the saved one is another, "none" without
          one), verify (read and hash everything). Result: state (ok, different, stale, none),
          digest, missing, different, extra: each {count, names (at most 20)}; touched (files of
          the right content and another mtime: what has that is hashed), hashed, seconds. The exit
          code is 0 in every state.
send      On the source, after `manifest`. Keys: root, manifest, digest; address (ours on the
          fabric, the only one that it binds), ports (the first that is free is taken), receivers
          [{name, address}]; patience, stall, drop_cache. Ends when every receiver is done, failed,
          or absent for `patience` seconds. Result: sent, read (bytes from the disk), receivers
          {name: {state (done, failed, absent), reason}}, seconds.
receive   On every other host, at the same time. Keys: root, manifest; name (ours), index (ours in
          the sender's list), source (our fabric address), sender (its name), address, ports;
          streams, patience, stall, drop_cache, verify (hash what is here already), delete (remove
          what the source does not have; else it is only reported). Result: digest, files,
          received (bytes over the wire), kept, resent (bytes each), extra, deleted, seconds.
drop      Drops the pages of `root` from the page cache. Result: files, bytes.

Defaults: streams one per core (4 to 8), patience 60 and stall 20 (seconds; without any sign of life
the other side is given up), the rest false. The last line of stdout is one JSON object: the result,
with cpu_seconds and peak_bytes, or {"error": why}; it is left out where `result` is false. Before
it come lines for people. An error is also on stderr. Exit code 0: done. 1: not.

The manifest is signed with the token of the run (wire.py), so that every byte is checked against
hashes that only the deployment's own sender can have sent. Confidentiality is the fabric's, unless
the run has a certificate.

Receivers ask, the sender answers: a receiver finds out what it lacks, asks for pieces over several
connections, hashes each before it counts, and renames a file when all of it is there and on disk.
Hashes are per piece (16 MiB), not per file: one file is hashed by several cores on both sides, a
piece that arrived wrong is all that is sent again, and what an interrupted run has left in
.NAME.relay.part is used. Pieces of zeros (sparse files) are known by their hash and never travel.

A symlink inside the root stays one (Hugging Face: snapshots/COMMIT/x -> ../../blobs/SHA). One that
leads to a file outside is followed and travels as that file: a plain model directory often links
shards from another disk, and the other hosts do not have what it points to. Links to nothing or to
a directory outside are errors.
"""

from __future__ import annotations

import json
import sys
from typing import Dict

from cluster.remote.relay.manifest import drop_tree, make_manifest
from cluster.remote.relay.receiver import Receive
from cluster.remote.relay.sender import Sender
from cluster.remote.relay.tree import check
from cluster.remote.wire import Role, run

ROLES: Dict[str, Role] = {
    "manifest": make_manifest,
    "check": check,
    "send": lambda wanted: Sender(wanted).run(),
    "receive": lambda wanted: Receive(wanted).run(),
    "drop": drop_tree,
}

if __name__ == "__main__":
    sys.exit(run(ROLES, ("send", "receive"), json.loads(sys.argv[2])))
