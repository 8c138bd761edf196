"""vLLM: its clients, how a server is started, and what of ours a server loads.

`environment`, `flags`, `server`, `think`, `worker` and `weight_*` run in the server's own
environment too: nothing is imported here, and they need none of ludic's dependencies.
"""
