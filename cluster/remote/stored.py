"""Lists what a cluster keeps on this host, images and models; deletes of it what it is told to.

Started like every program of remote/: `python3 - list JSON` or `python3 - delete JSON`, its text
over stdin.

Argument (JSON), the same for both roles: repositories (images of other repositories do not exist
for this program: vllm/vllm-openai), caches (Hugging Face caches: directories with models--* in
them), directories (models that are plain directories), transfers (directories in which an
interrupted transfer may have left something). delete has besides: entries, as list has named them.

list prints {docker_error, images, models, leftovers, problems}:
  image     id, references, foreign (references of other repositories), bytes, created (time),
            used_by (names of containers, stopped ones too)
  model     kind (cache, directory), name, path, bytes, last_use, has_atime, is_open, snapshots;
  snapshot  commit, refs, bytes (that no other snapshot has: what its end frees), last_use, is_open
  leftover  path, bytes, last_use, is_open
delete prints {deleted: [{kind, name, freed}], refused: [{kind, name, why}], freed}. An entry is
{kind: image, id}, {kind: snapshot, path, commit}, {kind: model, path} or {kind: leftover, path},
each with a name for the report.

Sizes are bytes on the disk, hard links and symlinks counted once. Times are seconds since 1970; the
last use is the newest time of a file: when it was read (to a day: relatime), or only written where
the file system keeps no access times (has_atime false). Open: a process has one of the files.
Exit code 0: see the answer. 1: the argument makes no sense.
"""

from __future__ import annotations

import calendar
import fcntl
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from typing import Any, Dict, Iterator, List, Set, Tuple

Inode = Tuple[int, int]
"""(device, number)"""

CACHED = re.compile(r"models--([^/]+)")
COMMIT = re.compile(r"[0-9a-f]{40}")
LEFTOVER = re.compile(r".+\.incomplete|\..+\.relay\.part")
"""huggingface_hub's beginnings, and those of relay.py. A model may have a file named x.part."""
TRANSFER_LEFTOVER = re.compile(r".+\.(incomplete|part)")
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
FRESH_SECONDS = 120
"""A beginning that was written to so recently may be in use over a network file system."""
DOCKER_SECONDS = 60


class Refusal(Exception):  # noqa: N818 -- it is what a person reads
    """Why something is not deleted."""


def docker(*arguments: str) -> str:
    """Output of docker. Raises OSError with its last line."""
    try:
        result = subprocess.run(
            ("docker", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=DOCKER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OSError("docker %s: no answer in %d s" % (arguments[0], DOCKER_SECONDS)) from None
    if result.returncode:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(lines[-1] if lines else "docker %s failed" % arguments[0])
    return result.stdout.decode(errors="replace")


def inspected(kind: str, ids: List[str]) -> List[Dict[str, Any]]:
    """What docker says of images or containers; those that are gone meanwhile are left out."""
    found: List[Dict[str, Any]] = []
    for start in range(0, len(ids), 100):
        try:
            found += json.loads(docker(kind, "inspect", *ids[start : start + 100]))
        except OSError:
            for each in ids[start : start + 100]:
                try:
                    found += json.loads(docker(kind, "inspect", each))
                except OSError as error:
                    if "o such" not in str(error):
                        raise
    return found


def repository(reference: str) -> str:
    """vllm/vllm-openai of docker.io/vllm/vllm-openai:v0.17@sha256:..."""
    name = reference.partition("@")[0]
    if ":" in name.rpartition("/")[2]:
        name = name.rpartition(":")[0]
    for prefix in ("index.docker.io/", "docker.io/", "library/"):
        if name.startswith(prefix):
            name = name[len(prefix) :]
    return name


def images(repositories: List[str], only: str | None = None) -> List[Dict[str, Any]]:
    """Images of these repositories. Raises OSError."""
    known = {repository(each) for each in repositories}
    if only is None:
        form = ("--no-trunc", "--format", "{{.ID}} {{.Size}}")
        rows = docker("image", "ls", "--all", *form).splitlines()
        sizes = dict(row.partition(" ")[::2] for row in rows)
    else:
        sizes = {only: ""}
    containers = inspected("container", docker("ps", "--all", "--quiet", "--no-trunc").split())
    users: Dict[str, List[str]] = {}
    for container in containers:
        users.setdefault(container["Image"], []).append(container["Name"].lstrip("/"))
        # In the containerd store an image can be known by another id of the same content.
        users.setdefault(container["Config"].get("Image", ""), []).append(
            container["Name"].lstrip("/")
        )
    found = []
    for image in inspected("image", sorted(sizes)):
        tags = [tag for tag in image.get("RepoTags") or [] if not tag.startswith("<none>")]
        digests = [each for each in image.get("RepoDigests") or [] if "<none>@" not in each]
        references = tags + digests
        ours = [each for each in references if repository(each) in known]
        if not ours:
            continue
        names = {image["Id"], *references}
        found.append(
            {
                "id": image["Id"],
                "references": ours,
                "foreign": [each for each in tags if repository(each) not in known],
                # Of an image in containerd's store inspect knows the packed layers only.
                "bytes": max(image.get("Size") or 0, docker_size(sizes.get(image["Id"], ""))),
                "created": docker_time(image.get("Created") or ""),
                "used_by": sorted({user for name in names for user in users.get(name, [])}),
            }
        )
    return found


def docker_size(text: str) -> int:
    """Bytes of 3.83GB, as Docker writes it; 0 where it is none."""
    found = re.fullmatch(r"([\d.]+)([kMGT]?)B", text.strip())
    return int(float(found.group(1)) * 1000 ** " kMGT".index(found.group(2) or " ")) if found else 0


def docker_time(text: str) -> float | None:
    """Seconds since 1970 of 2026-11-30T22:47:41.123456789Z or ...+01:00."""
    found = re.match(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)?", text)
    if found is None:
        return None
    seconds = calendar.timegm(time.strptime(found.group(1), "%Y-%m-%dT%H:%M:%S"))
    zone = found.group(2) or "Z"
    if zone != "Z":
        offset = int(zone[1:3]) * 3600 + int(zone[4:6]) * 60
        seconds -= offset if zone[0] == "+" else -offset
    return float(seconds) if seconds > 0 else None


def opened() -> Set[Inode]:
    """Files that a process of this host or of one of its containers has open or mapped."""
    found: Set[Inode] = set()
    for process in os.listdir("/proc"):
        if not process.isdigit():
            continue
        folder = "/proc/%s/fd" % process
        try:
            for name in os.listdir(folder):
                # Not by name: in a container the same file has another one.
                status = os.stat("%s/%s" % (folder, name))
                if stat.S_ISREG(status.st_mode):
                    found.add((status.st_dev, status.st_ino))
        except OSError:
            pass
        try:
            with open("/proc/%s/maps" % process, "rb") as stream:
                for line in stream:
                    words = line.split(None, 5)
                    if len(words) > 4 and words[4] != b"0":
                        major, minor = (int(part, 16) for part in words[3].split(b":"))
                        found.add((os.makedev(major, minor), int(words[4])))
        except (OSError, ValueError):
            pass
    return found


def has_access_times(path: str) -> bool:
    """False where the file system is mounted with noatime."""
    try:
        with open("/proc/self/mountinfo", "rb") as stream:
            lines = stream.read().decode(errors="replace").splitlines()
        place = os.path.realpath(path)
    except OSError:
        return True
    best, options = "", ""
    for line in lines:
        words = line.split()
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), words[4])
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, options = point, words[5]
    return "noatime" not in options.split(",")


class Use:
    """Bytes, the last use and the inodes of some files; what is added twice counts once."""

    def __init__(self, has_atime: bool) -> None:
        self.has_atime = has_atime
        self.bytes = 0
        self.last_use = 0.0
        self.inodes: Set[Inode] = set()

    def add(self, status: os.stat_result) -> None:
        """Count a file or a symlink."""
        key = (status.st_dev, status.st_ino)
        if key in self.inodes:
            return
        self.inodes.add(key)
        self.bytes += status.st_blocks * 512
        if stat.S_ISREG(status.st_mode):
            newest = max(status.st_atime, status.st_mtime) if self.has_atime else status.st_mtime
            self.last_use = max(self.last_use, newest)

    def report(self, is_open: Set[Inode]) -> Dict[str, Any]:
        """As JSON has it."""
        return {
            "bytes": self.bytes,
            "last_use": self.last_use or None,
            "is_open": not is_open.isdisjoint(self.inodes),
        }


def below(root: str) -> Iterator[Tuple[str, os.stat_result]]:
    """Every file and symlink below a directory; no symlink is followed."""
    try:
        entries = list(os.scandir(root))
    except OSError:
        return
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode):
            yield from below(entry.path)
        else:
            yield entry.path, status


def weigh(paths: Iterator[Tuple[str, os.stat_result]], has_atime: bool) -> Use:
    use = Use(has_atime)
    for path, status in paths:
        if not LEFTOVER.fullmatch(os.path.basename(path)):
            use.add(status)
    return use


def read(path: str) -> str:
    try:
        with open(path) as stream:
            return stream.read().strip()
    except (OSError, ValueError):
        return ""


def references_of(folder: str) -> Dict[str, List[str]]:
    """Commit -> branches and tags that point to it."""
    root, found = os.path.join(folder, "refs"), {}  # type: str, Dict[str, List[str]]
    for path, _ in below(root):
        found.setdefault(read(path), []).append(os.path.relpath(path, root))
    return found


def snapshot_files(folder: str, commit: str) -> Dict[Inode, Tuple[str, os.stat_result]]:
    """What a snapshot shows, by inode: itself or what its links lead to.

    That may be outside of the folder: newer versions of huggingface_hub can keep the blobs of
    several models in CACHE/blobs. Such a file may be in use, but it ends with no snapshot.
    """
    found = {}
    for path, status in below(os.path.join(folder, "snapshots", commit)):
        if stat.S_ISLNK(status.st_mode):
            target = os.path.realpath(path)
            try:
                path, status = target, os.lstat(target)
            except OSError:
                continue
        found[(status.st_dev, status.st_ino)] = (path, status)
    return found


def is_inside(path: str, root: str) -> bool:
    return path.startswith(root.rstrip("/") + "/")


def commits(folder: str) -> List[str]:
    try:
        names = os.listdir(os.path.join(folder, "snapshots"))
    except OSError:
        return []
    return sorted(name for name in names if COMMIT.fullmatch(name))


def own_files(folder: str, commit: str) -> Dict[Inode, Tuple[str, os.stat_result]]:
    """The files of a snapshot that no other snapshot of the model shows."""
    own = snapshot_files(folder, commit)
    for other in commits(folder):
        if other != commit:
            for key in snapshot_files(folder, other):
                own.pop(key, None)
    return own


def shown(folder: str, commit: str, has_atime: bool) -> Use:
    """All that a snapshot shows, whoever else shows it."""
    use = Use(has_atime)
    for _, status in snapshot_files(folder, commit).values():
        use.add(status)
    return use


def cached(folder: str, is_open: Set[Inode], has_atime: bool) -> Dict[str, Any]:
    """A model of a Hugging Face cache."""
    refs = references_of(folder)
    snapshots = []
    for commit in commits(folder):
        found = shown(folder, commit, has_atime).report(is_open)
        own = Use(has_atime)
        for path, status in own_files(folder, commit).values():
            if is_inside(path, os.path.realpath(folder)):
                own.add(status)
        found.update(bytes=own.bytes, commit=commit, refs=sorted(refs.get(commit, [])))
        snapshots.append(found)
    name = os.path.basename(folder)[len("models--") :].replace("--", "/", 1)
    found = weigh(below(folder), has_atime).report(is_open)
    found["is_open"] = found["is_open"] or any(each["is_open"] for each in snapshots)
    found.update(kind="cache", name=name, path=folder, has_atime=has_atime, snapshots=snapshots)
    return found


def folders(cache: str) -> List[str]:
    """The models of a cache; symlinks are not ours."""
    try:
        names = sorted(name for name in os.listdir(cache) if CACHED.fullmatch(name))
    except OSError:
        return []
    paths = [os.path.join(cache, name) for name in names]
    return [path for path in paths if os.path.isdir(path) and not os.path.islink(path)]


def leftover_paths(wanted: Dict[str, Any]) -> List[str]:
    roots = [(root, LEFTOVER) for root in wanted["directories"]]
    roots += [(folder, LEFTOVER) for cache in wanted["caches"] for folder in folders(cache)]
    roots += [(root, TRANSFER_LEFTOVER) for root in wanted["transfers"]]
    return sorted(
        {
            path
            for root, pattern in roots
            for path, status in below(root)
            if pattern.fullmatch(os.path.basename(path)) and stat.S_ISREG(status.st_mode)
        }
    )


def listed(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """The answer of role list."""
    found: Dict[str, Any] = {"docker_error": None, "images": [], "models": [], "leftovers": []}
    problems: List[str] = []
    try:
        found["images"] = images(wanted["repositories"]) if wanted["repositories"] else []
    except (OSError, ValueError, KeyError) as error:
        found["docker_error"] = str(error)
    is_open = opened()
    for cache in wanted["caches"]:
        has_atime = has_access_times(cache)
        found["models"] += [cached(folder, is_open, has_atime) for folder in folders(cache)]
    for directory in wanted["directories"]:
        if os.path.islink(directory):
            problems.append("%s is a symlink; it is left alone" % directory)
        elif os.path.isdir(directory):
            has_atime = has_access_times(directory)
            row = weigh(below(directory), has_atime).report(is_open)
            row.update(
                kind="directory",
                name=directory,
                path=directory,
                has_atime=has_atime,
                snapshots=[],
            )
            found["models"].append(row)
    for path in leftover_paths(wanted):
        try:
            status = os.lstat(path)
        except OSError:
            continue
        found["leftovers"].append(
            {
                "path": path,
                "bytes": status.st_blocks * 512,
                "last_use": status.st_mtime,
                "is_open": (status.st_dev, status.st_ino) in is_open or is_locked(path),
            }
        )
    found["problems"] = problems
    return found


def is_locked(path: str) -> bool:
    """True where huggingface_hub, perhaps of another host, downloads this blob right now."""
    blobs = os.path.dirname(path)
    folder = os.path.dirname(blobs)
    if os.path.basename(blobs) != "blobs":
        return False
    blob = os.path.basename(path).partition(".")[0]
    cache, name = os.path.split(folder)
    try:
        with open(os.path.join(cache, ".locks", name, blob + ".lock")) as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def check_place(path: str, root: str) -> None:
    """Raise Refusal unless `path` is below `root` by name, and no symlink leads elsewhere."""
    if os.path.normpath(path) != path or not is_inside(path, os.path.normpath(root)):
        raise Refusal("it is not below %s" % root)
    relative = os.path.relpath(path, os.path.normpath(root))
    if os.path.realpath(path) != os.path.join(os.path.realpath(root), relative):
        raise Refusal("a symlink is on the way to it")


def delete_image(entry: Dict[str, Any], wanted: Dict[str, Any]) -> int:
    found = images(wanted["repositories"], entry["id"])
    if not found:
        if inspected("image", [entry["id"]]):
            raise Refusal("no repository of this cluster has it")
        return 0
    image = found[0]
    if image["used_by"]:
        raise Refusal("container %s uses it" % ", ".join(image["used_by"]))
    if image["foreign"]:
        raise Refusal("it is also %s, which is not of this cluster" % ", ".join(image["foreign"]))
    root = docker("info", "--format", "{{.DockerRootDir}}").strip()
    before = free(root)
    # By its names and never by force: Docker itself refuses what a container uses.
    for reference in image["references"]:
        try:
            docker("image", "rm", reference)
        except OSError as error:
            if "o such image" not in str(error):
                raise Refusal(str(error)) from None
    if inspected("image", [image["id"]]):
        docker("image", "rm", image["id"])
    if before is None:
        return int(image["bytes"])
    # Layers that another image has too are not freed, and only the disk knows.
    return max(0, min((free(root) or 0) - before, int(image["bytes"])))


def free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def cache_of(folder: str, wanted: Dict[str, Any]) -> str:
    for cache in wanted["caches"]:
        name = os.path.basename(folder)
        if os.path.dirname(folder) == os.path.normpath(cache) and CACHED.fullmatch(name):
            return str(cache)
    raise Refusal("it is not a model of a cache of this cluster")


def unopened(use: Use) -> int:
    """The bytes that end with these files. Raises Refusal where a process has one open."""
    if not opened().isdisjoint(use.inodes):
        raise Refusal("a process has it open")
    return use.bytes


def delete_snapshot(entry: Dict[str, Any], wanted: Dict[str, Any]) -> int:
    folder, commit = entry["path"], entry["commit"]
    check_place(folder, cache_of(folder, wanted))
    if not COMMIT.fullmatch(commit):
        raise Refusal("%r is not a commit" % commit)
    snapshot = os.path.join(folder, "snapshots", commit)
    if not os.path.isdir(snapshot):
        return 0
    check_place(snapshot, folder)
    if commits(folder) == [commit]:
        return delete_model(dict(entry, kind="model"), wanted)
    unopened(shown(folder, commit, True))
    use, own = Use(True), own_files(folder, commit)
    for path, status in own.values():
        if is_inside(path, os.path.realpath(folder)):
            use.add(status)
    for name in references_of(folder).get(commit, []):
        os.unlink(os.path.join(folder, "refs", name))
    shutil.rmtree(snapshot)
    blobs = os.path.realpath(os.path.join(folder, "blobs"))
    for path, _ in own.values():
        # What the snapshot held itself is gone with it.
        if os.path.dirname(path) == blobs and BLOB.fullmatch(os.path.basename(path)):
            unlink(path)
    for place in ("trees/%s.json", ".multinode-vllm/%s.json"):
        unlink(os.path.join(folder, place % commit))
    shutil.rmtree(os.path.join(folder, ".no_exist", commit), ignore_errors=True)
    return use.bytes


def unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def delete_model(entry: Dict[str, Any], wanted: Dict[str, Any]) -> int:
    path = entry["path"]
    if path in wanted["directories"]:
        if os.path.normpath(path) != path or path.count("/") < 2:
            raise Refusal("that is no directory of its own")
        if os.path.realpath(path) != path:
            raise Refusal("a symlink is on the way to it")
    else:
        check_place(path, cache_of(path, wanted))
    if not os.path.isdir(path):
        return 0
    if os.path.ismount(path):
        raise Refusal("a file system is mounted there")
    use = Use(True)
    for place, status in below(path):
        if is_locked(place):
            raise Refusal("a download into it is under way")
        use.add(status)
    for commit in commits(path):
        unopened(shown(path, commit, True))
    size = unopened(use)
    shutil.rmtree(path)
    return size


def delete_leftover(entry: Dict[str, Any], wanted: Dict[str, Any]) -> int:
    path = entry["path"]
    if not os.path.lexists(path):
        return 0
    if path not in leftover_paths(wanted):
        raise Refusal("it is not what a transfer of this cluster has left")
    roots = list(wanted["directories"]) + list(wanted["transfers"]) + list(wanted["caches"])
    check_place(path, next(root for root in roots if is_inside(path, os.path.normpath(root))))
    status = os.lstat(path)
    use = Use(True)
    use.add(status)
    if is_locked(path) or time.time() - status.st_mtime < FRESH_SECONDS:
        raise Refusal("a transfer is under way, or was until just now")
    size = unopened(use)
    os.unlink(path)
    return size


DELETERS = {
    "image": delete_image,
    "snapshot": delete_snapshot,
    "model": delete_model,
    "leftover": delete_leftover,
}


def deleted(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """The answer of role delete."""
    done: List[Dict[str, Any]] = []
    refused: List[Dict[str, Any]] = []
    for entry in wanted["entries"]:
        row = {"kind": entry["kind"], "name": entry["name"]}
        try:
            if entry["kind"] not in DELETERS:
                raise Refusal("unknown kind")
            done.append(dict(row, freed=DELETERS[entry["kind"]](entry, wanted)))
        except (Refusal, OSError) as error:
            refused.append(dict(row, why=str(error)))
    return {"deleted": done, "refused": refused, "freed": sum(row["freed"] for row in done)}


def main(role: str, wanted: Dict[str, Any]) -> int:
    for key in ("repositories", "caches", "directories", "transfers"):
        wanted[key] = [each.rstrip("/") or "/" for each in wanted.get(key) or []]
    if role not in ("list", "delete"):
        sys.stderr.write("the role is list or delete, not %r\n" % role)
        return 1
    print(json.dumps(listed(wanted) if role == "list" else deleted(wanted)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
