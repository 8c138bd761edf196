"""The queue between actors, which play groups, and the trainer, which trains on them.

`base` says what a log of groups guarantees, `sqlite` and `redis` are two such logs, `entries` turns
a group into bytes, `arrivals` holds which groups were trained, `source` is the trainer's batch
source and `actor` the loop of a process that plays. `base`, `sqlite` and `redis` do not import
torch.
"""
