"""A pyinfra inventory of @fake hosts on which everything is as it should be already."""

import json
import re

from cluster.load import load
from cluster.node import WATCHDOG_TIMER, Image, Versions, render
from cluster.operations.rollback import identity
from tests.fleet import fake

_cluster = fake(load())
_image = Image("sha256:" + "0" * 64, Versions("3.12.9", "0.17.1", "2.48.0", "2.9.0"))


def _settled(name: str) -> dict[re.Pattern[str], str]:
    node = render(_cluster, name, _image)
    fabric = _cluster.hosts[name].fabric
    unit = {"LoadState": "loaded", "ActiveState": "active", "UnitFileState": "enabled"}
    state = {
        "docker_error": None,
        "systemd_error": None,
        "image": {"id": _image.id, "digests": []},
        "containers": {
            container: {
                "id": "c",
                "image": _image.id,
                "status": "running",
                "definition": definition,
            }
            for container, definition in node.definitions.items()
        },
        "units": dict.fromkeys((*node.definitions, WATCHDOG_TIMER), unit),
        "files": {file.path: file.content for file in node.files},
        "secret_files": {},
        "listening": True,
        "known_good": [f"20260101T000000Z-{identity(_cluster, _image)}.tar"],
        "addresses": {fabric.interface: [str(fabric.address.ip)]},
    }
    answer = {"text": "Hello", "tokens": 1, "seconds": 0.1}
    return {
        re.compile("node_state"): json.dumps(state),
        re.compile("completion"): json.dumps(answer),
        re.compile("- relay"): json.dumps({"state": "ok", "digest": "d"}),
    }


def _data(name: str) -> dict[str, object]:
    return {
        "cluster": _cluster,
        "fake_delay": 0,
        "fake_delay_jitter": 0,
        "fake_responses": _settled(name),
    }


head = [(_cluster.head, _data(_cluster.head))]
workers = [(name, _data(name)) for name in _cluster.workers]
