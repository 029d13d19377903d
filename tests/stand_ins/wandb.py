"""Stands in for wandb: takes what its functions take, and records it."""

CALLS: list[tuple[str, dict]] = []
FAILING: set[str] = set()  # names of calls that raise


class CommError(Exception):
    """What wandb raises when its server does not answer."""


def record(call: str, /, **given: object) -> None:
    CALLS.append((call, {key: value for key, value in given.items() if value is not None}))
    if call in FAILING:
        raise CommError("the server does not answer")


class Image:
    def __init__(
        self, data_or_path, mode=None, caption=None, grouping=None, classes=None, boxes=None, masks=None,
        file_type=None, normalize=True,
    ):  # fmt: skip
        self.size = data_or_path.size


class Histogram:
    def __init__(self, sequence=None, np_histogram=None, num_bins=64):
        heights, edges = np_histogram
        assert len(edges) == len(heights) + 1


class Run:
    def define_metric(
        self, name, step_metric=None, step_sync=None, hidden=None, summary=None, goal=None, overwrite=None
    ):
        record("define_metric", name=name, step_metric=step_metric)

    def log(self, data, step=None, commit=None):
        record("log", data=data, step=step)

    def finish(self, exit_code=None, quiet=None):
        record("finish")


def init(
    entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,  # noqa: A002
    config_exclude_keys=None, config_include_keys=None, allow_val_change=None, group=None, job_type=None, mode=None,
    force=None, reinit=None, resume=None, resume_from=None, fork_from=None, save_code=None, tensorboard=None,
    sync_tensorboard=None, monitor_gym=None, settings=None,
) -> Run:  # fmt: skip
    given = {"project": project, "dir": dir, "id": id, "name": name, "config": config, "mode": mode}
    record("init", **given, resume=resume, allow_val_change=allow_val_change, settings=settings)
    return Run()
