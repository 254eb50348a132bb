"""Has the sampler: logits in, one token for each row out.

`sampler` draws, after `penalties` has changed single logits, with the random numbers of `noise`. A sequence's
parameters are `services.engine.schedule.sequence.SamplingParams`.
"""
