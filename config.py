"""pyinfra's own settings for this project."""

from pyinfra import config

config.REQUIRE_PYINFRA_VERSION = ">=3.10,<4"
# One failed host stops the run: workers that start against a dead head only hang.
config.FAIL_PERCENT = 0
