"""Serves /v1/responses, OpenAI's newer endpoint, without a memory: nothing is stored, and none refers to another.

call.py      the fields of a body -> one GenerateRequest; those that are refused by name
input.py     a text or items (messages, calls of functions and their results, reasoning) -> chat messages
output.py    what the model makes -> items, and the events that tell of them
writer.py    the response: whole, or as a stream of events
"""
