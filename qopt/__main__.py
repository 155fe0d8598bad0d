"""The entry point, `qopt` and `python -m qopt`: guarded before anything slow is imported."""

from __future__ import annotations

import os
from typing import NoReturn


def run() -> NoReturn:
    """Run a command and end the process with its exit code."""
    try:
        from qopt import cli

        cli.run()
    except KeyboardInterrupt:  # `cli.main` tells of one, once it is there to be interrupted
        os._exit(130)


if __name__ == "__main__":
    run()
