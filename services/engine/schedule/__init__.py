"""Decides what each step of an engine runs, and absorbs what it produced. Pure.

Read `sequence` first (what is served, and the records of a step), then `scheduler` (a step's choice and its result),
`queues` (which sequence joins the batch next) and `batch` (who runs, and the blocks that this takes).
Never: tensors, threads, time that is not an argument.
"""
