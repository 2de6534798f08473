"""Settings of the process that runs the tests."""

from . import process_settings  # noqa: F401
