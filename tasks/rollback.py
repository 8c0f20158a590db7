"""Go back to the last deployment that ended in a completion and is not what cluster.yaml says.

An older one that is still kept: --data to=ID. cluster.yaml stays as it is: correct it before you
deploy again.
"""

from pyinfra import host, local

from cluster import operations, rolling_back

after_failure = bool(host.data.get("after_failure"))

if not after_failure:
    local.include("tasks/lock.py")

choice = rolling_back.choose(host.data.get("to"), after_failure)
data = rolling_back.task_data(choice, after_failure)

rolling_back.restored(name="Put the files back", choice=choice, after_failure=after_failure)

local.include("tasks/ray_head.py", data=data)
local.include("tasks/ray_workers.py", data=data)
local.include("tasks/serve.py", data=data)
local.include("tasks/verify.py", data=data)
local.include("tasks/keep.py", data=data)

if after_failure and host.name == operations.reporter(host.data.cluster):
    rolling_back.given_up(name="End this deploy as failed", choice=choice)
