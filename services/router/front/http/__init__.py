"""Serves OpenAI-style HTTP: requests and answers have another form than over gRPC, and take the same way through the
router.

    server.py       uvicorn inside the router's event loop, and what its connections may cost
    app.py          which path leads where; models, health, metrics; what pages in browsers may ask
    generation.py   one call: body -> GenerateRequests -> front/intake.py, side by side -> JSON or events
    body.py         the bytes of a body, counted and parsed, and typed access to its fields
    parameters.py   fields both endpoints share -> GenerateRequest; those that are refused by name
    completions.py  /v1/completions: its fields, and how its choices are written
    chat.py         /v1/chat/completions: the same
    answers.py      what these two make of a body, and their answers as one JSON object or as the events of one stream
    reply.py        what goes out: JSON, events, errors and their statuses

Ranges are checked where gRPC's are (services/router/front/validation.py); here only types are.
"""
