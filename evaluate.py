#!/usr/bin/env python
"""Measure images as papers do: FID, KID, Inception Score, precision and recall, in one pass of one network.

python evaluate.py runs/demo --num_images 1000
python evaluate.py runs/demo --nll
python evaluate.py runs/demo --watch --keep_best fid
python evaluate.py --generated samples --dataset_name uoft-cs/cifar10 --output_dir results
accelerate launch --num_processes 4 evaluate.py runs/cifar10 --num_images 50000
"""

import logging
import sys
from pathlib import Path

from common.errors import quick_imports, run_script
from common.files import default_cache_dir, make_folder
from evaluation.evaluate_options import parse_evaluation

logger = logging.getLogger("evaluate")


def main() -> None:
    options = parse_evaluation(sys.argv[1:])
    if options.compare:
        from evaluation.comparison import compare_runs

        compare_runs(options.compare, Path(options.output_dir or "comparison"))
        return
    if options.nll:
        with quick_imports():
            from common.processes import start_processes
            from evaluation.likelihood import Likelihood

        processes = start_processes(options)
        Likelihood(options, processes).measure()
        processes.finish()
        return
    results = options.output_dir or options.run_dir
    if results:
        make_folder(Path(results).expanduser())  # what cannot be written is better known before it is measured
    if options.save_statistics:
        make_folder(Path(options.save_statistics).parent)

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    with quick_imports():
        from common.processes import start_processes
        from evaluation.networks import load_networks
        from evaluation.results import check_results
        from evaluation.session import Session

    if results:
        check_results(Path(results).expanduser())
    processes = start_processes(options)
    cache_dir = Path(options.cache_dir or default_cache_dir()).expanduser()
    with processes.main_first():
        networks = load_networks(options, cache_dir, processes.device)

    # Images against real ones, or every checkpoint of a run against what it was trained on.
    session = Session(options, networks, cache_dir, processes)
    if options.watch:
        session.watch_run()
    elif options.run_dir:
        session.measure_run()
    elif options.generated:
        session.measure_images()
    else:
        session.save_statistics()
    processes.finish()


if __name__ == "__main__":
    run_script(main)
