"""Before the first step: do the trainer's log-probabilities equal those of the sampler, and if
not, why not?"""
