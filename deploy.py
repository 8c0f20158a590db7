"""From host data to a served model: every step in order. Each also runs alone, from tasks/."""

from pyinfra import local

# Where vllm serve already runs as wanted, the completion at the end proves more than the checks on
# the way there. A task that runs alone always checks.
unless_serving = {"unless_serving": True}

local.include("tasks/lock.py")
local.include("tasks/preflight.py", data=unless_serving)
local.include("tasks/image.py")
local.include("tasks/environment.py")
local.include("tasks/ray_head.py", data=unless_serving)
local.include("tasks/ray_workers.py", data=unless_serving)
local.include("tasks/prove.py", data=unless_serving)
local.include("tasks/serve.py")
local.include("tasks/verify.py")
