"""Stands in for trackio: takes what its functions take, and records it."""

CALLS: list[tuple[str, dict]] = []


class Image:
    def __init__(self, value, caption=None):
        self.size = value.size


class Histogram:
    def __init__(self, sequence=None, np_histogram=None, num_bins=64):
        heights, edges = np_histogram
        assert len(edges) == len(heights) + 1


class Run:
    def log(self, metrics, step=None):
        CALLS.append(("log", {"data": metrics, "step": step}))

    def finish(self):
        CALLS.append(("finish", {}))


def init(
    project, name=None, group=None, space_id=None, server_url=None, space_storage=None, dataset_id=None,
    bucket_id=None, config=None, resume="never", settings=None, private=None, embed=True, auto_log_gpu=None,
    gpu_log_interval=10.0, auto_log_cpu=None, cpu_log_interval=10.0, webhook_url=None, webhook_min_level=None,
) -> Run:  # fmt: skip
    CALLS.append(("init", {"project": project, "name": name, "config": config, "resume": resume}))
    return Run()
