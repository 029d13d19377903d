#!/usr/bin/env python
"""Write a run, or several side by side, as one HTML page that works offline.

python report.py runs/cifar10
python report.py runs/uniform runs/stratified --output comparison.html
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError, run_script, say, user_errors
from common.options import ConfigOptions, option, parse_options, section


@section("report")
class ReportOptions:
    runs: list[str] = option([], "Runs to show, side by side. Given as the first words.", positional=True)
    output: str | None = option(
        None, "File to write (default: report.html, in the run's folder, or here if there are several runs)."
    )


@dataclass
class Options(ConfigOptions, ReportOptions):
    """All options of this script."""


def parse(arguments: list[str]) -> Options:
    """Return the options; raise if there is nothing to show, or nowhere to write it."""
    description = "Write a run, or several side by side, as one HTML page that works offline."
    usage = "%(prog)s RUN [RUN ...] [--output FILE.html]"
    options = parse_options(Options, arguments, description=description, usage=usage)
    if not options.runs:
        raise UserError("name one or more runs, as in: python report.py runs/cifar10")
    for run in options.runs:
        if not Path(run).is_dir():
            raise UserError(f"{run}: there is no such folder; name the --output_dir of a training")
    path = page_of(options)
    if path.suffix != ".html":
        raise UserError(f"--output {path}: must end in .html")
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--output {path}: {'is a folder' if path.is_dir() else f'there is no folder {path.parent}'}")
    return options


def page_of(options: Options) -> Path:
    """Return where the page goes."""
    return Path(options.output or Path(options.runs[0] if len(options.runs) == 1 else "", "report.html"))


def main() -> None:
    options = parse(sys.argv[1:])
    path, runs = page_of(options), [Path(run) for run in options.runs]

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    from reporting.run_page import write_report
    from run_folder.folder import RunFolder

    for run in runs:
        if not RunFolder(run).read_metrics():
            say(f"{run}: there are no metrics in it yet, so it has no curves")
    with user_errors(f"--output {path}: cannot be written", OSError):
        write_report(runs, path)
    print(path)


if __name__ == "__main__":
    run_script(main)
