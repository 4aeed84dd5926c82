"""What the scheduler costs and what it decides, measured without a worker: no device, no network.

`python -m stepahead.scheduler.bench scheduler` times plan and commit; `... traces FILE` replays recorded
request traces in virtual time.
"""
