"""Go back to the last deployment that ended in a completion and is not what cluster.yaml says.

An older one that is still kept: --data to=ID. cluster.yaml stays as it is: correct it before you
deploy again.
"""

from pyinfra import host, local

from cluster.operations import rollback
from cluster.shell import reporter

after_failure = bool(host.data.get("after_failure"))

if not after_failure:
    local.include("tasks/lock.py")

choice = rollback.choose(host.data.get("to"), after_failure)
data = rollback.task_data(choice, after_failure)

rollback.restored(name="Put the files back", choice=choice, after_failure=after_failure)

local.include("tasks/ray_head.py", data=data)
local.include("tasks/ray_workers.py", data=data)
local.include("tasks/serve.py", data=data)
local.include("tasks/verify.py", data=data)
local.include("tasks/keep.py", data=data)

if after_failure and host.name == reporter(host.data.cluster):
    rollback.given_up(name="End this deploy as failed", choice=choice)
