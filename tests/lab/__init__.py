"""Real hosts on one machine, for the end-to-end tests and the demo.

Each host is a container with systemd, sshd and a Docker engine of its own. spark-1 is on an office
network and on a fabric, the others on the fabric alone; they are Debian 12 and Debian 13 in turn. A
registry holds real vLLM and real Ray for the CPU. `python -m tests.lab up` brings it up.
"""

from .lab import IMAGE, Lab, build, down, existing, summary, up
from .shell import LabError

__all__ = ["IMAGE", "Lab", "LabError", "build", "down", "existing", "summary", "up"]
