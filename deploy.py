"""From host data to a served model: every step in order. Each also runs alone, from tasks/."""

from pyinfra import host, local

from cluster.operations import rollback

cluster = host.data.cluster

# Where vllm serve already runs as wanted, the completion at the end proves more than the checks on
# the way there. A task that runs alone always checks.
unless_serving = {"unless_serving": True}

local.include("tasks/lock.py")
local.include("tasks/preflight.py", data=unless_serving)
local.include("tasks/image.py")
local.include("tasks/model.py")

# From here on the hosts change.
changing = {**unless_serving, **rollback.failure_arguments(cluster)}

local.include("tasks/environment.py", data=changing)
local.include("tasks/ray_head.py", data=changing)
local.include("tasks/ray_workers.py", data=changing)
local.include("tasks/prove.py", data=changing)
local.include("tasks/serve.py", data=changing)
local.include("tasks/verify.py", data=changing)
local.include("tasks/keep.py", data=changing)

if cluster.on_failure == "rollback":
    after_failure = {"after_failure": True, "_if": rollback.something_failed}
    local.include("tasks/rollback.py", data=after_failure)
