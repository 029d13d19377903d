"""A user's mistake is one line on the terminal and an exit code, never a traceback."""

import os
import sys
from collections.abc import Callable
from pathlib import Path


class UserError(Exception):
    """Something the user can put right: what is wrong, with the name and the value, and what to do."""

    exit_code = 2


class RunFailed(UserError):
    """A run that started well and cannot go on: what happened, and what is left of it."""

    exit_code = 1


def run_script(main: Callable[[], None]) -> None:
    """Run a script's `main`; a `UserError` becomes one line, said once a machine however many processes it has."""
    try:
        main()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            message = " ".join(str(error).split())
            print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
