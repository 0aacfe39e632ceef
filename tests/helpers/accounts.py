"""A made-up account of an emulated process with one GPU and no problems."""

LINE = {"file": "train.py", "line": 3, "name": "<module>", "code": "model(x)", "own": True}
GPU = {
    "index": 0, "name": "card", "compute_capability": [8, 6], "total_bytes": 10, "peak_allocated_bytes": 5,
    "peak_reserved_bytes": 6, "peak_phase": "start", "peak_event": 1, "retries": 0, "phases": [], "phases_off_bytes": 0,
    "spans": [], "events": 1, "curve": [[0, 0, 0], [1, 5, 6]],
    "tensors": [{"script": LINE, "library": None, "phase": "start", "nbytes": 5, "count": 1}],
}  # fmt: skip
ACCOUNT = {
    "pid": 1, "rank": None, "world_size": 1, "argv": ["train.py"], "versions": {"torch": "2"}, "ended": "exit",
    "error": None, "seconds": 1.0, "steps": 1, "skipped_steps": 0, "backwards": 1, "stepped_after_oom": False,
    "computed_after_oom": False, "loss_scaler": False, "host_bytes": 1, "gpus": [GPU], "out_of_memory": [],
    "out_of_memory_count": 0, "work": {}, "work_by_step": [], "notices": [],
}  # fmt: skip
