"""OpenAI-style HTTP on the router: another way of writing requests and answers, the same way through the system.

    server.py       uvicorn inside the router's event loop: port, limits, end
    app.py          which path leads where; models, health, metrics
    generation.py   one call: body -> GenerateRequests -> several.py -> JSON or events
    several.py      its prompts side by side, each by services/router/intake.py; one that fails ends them all
    writers.py      their answers as one JSON object, or as the events of one stream
    body.py         the bytes of a body, and typed access to its fields
    parameters.py   fields both endpoints share -> GenerateRequest; unsupported.py: those that are refused by name
    completions.py  /v1/completions: its fields, and how its answers are written
    chat.py         /v1/chat/completions: the same
    call.py         what these two make of a body
    logprobs.py     tokens as text and bytes
    reply.py        what goes out: JSON, events, errors
    errors.py       the table from the tree of errors to HTTP statuses
    connection.py   a client that goes away

Ranges are checked where gRPC's are (services/router/validation.py); here only types are.
"""
