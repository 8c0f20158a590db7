"""From host data to a served model: every step in order. Each also runs alone, from tasks/."""

from pyinfra import local

local.include("tasks/image.py")
local.include("tasks/environment.py")
local.include("tasks/ray_head.py")
local.include("tasks/ray_workers.py")
local.include("tasks/serve.py")
local.include("tasks/verify.py")
