"""A run with actors: processes that sample for its trainer, through a queue.

trainer_side      batches of what actors deliver, and the versions that they sample with
worker            the actor's process
policy_versions, queue  what both sides agree on; the queue is open before an actor looks at it
supervision       starting actors, and counting them; `runs.launching` lists the processes of a run
"""
