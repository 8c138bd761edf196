"""The inference servers of a run (`place.servers`): processes of their own, which the supervisor of
the run restarts.

    server --address--> servers/NAME.json --> trainer and actors
    trainer --publish--> pushed/version_N --> servers
"""
