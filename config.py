"""pyinfra's own settings for this project."""

import signal
import sys
from types import FrameType

from pyinfra import config

config.REQUIRE_PYINFRA_VERSION = ">=3.10,<4"
# One failed host stops the run: workers that start against a dead head only hang.
config.FAIL_PERCENT = 0


def _interrupted(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 -- signal's own
    """End with the code that a shell expects after Ctrl-C; pyinfra would end with 0."""
    # The end closes the connections; one that hangs must not keep the process.
    signal.alarm(10)
    sys.stderr.write("\nInterrupted. The same command again goes on from what is there.\n")
    sys.exit(128 + signal.SIGINT)


signal.signal(signal.SIGINT, _interrupted)
