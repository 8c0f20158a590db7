"""Restart the whole group in order: vllm serve stops, Ray on the head, on the workers, vllm serve.

For a group that is wedged in a way that its watchdog does not see. It needs a deployed cluster.
"""

from pyinfra import host, local

from cluster.operations import services

local.include("tasks/lock.py")

services.restarting(name="Stop vllm serve, and start all anew", cluster=host.data.cluster)

local.include("tasks/ray_head.py")
local.include("tasks/ray_workers.py")
local.include("tasks/serve.py")
local.include("tasks/verify.py")
