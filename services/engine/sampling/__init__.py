"""Chooses one token for each row of logits.

`penalties` changes single logits first; `sampler` then chooses, with the random numbers of `noise`. A sequence's
parameters are `services.engine.schedule.sequence.SamplingParams`.
"""
