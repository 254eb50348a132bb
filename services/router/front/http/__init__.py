"""Serves OpenAI-style HTTP: requests and answers have another form than over gRPC, and take the same way through the
router.

    server.py       uvicorn inside the router's event loop, and TLS
    connection.py   one connection: what uvicorn is given of it, and what it may cost
    connections.py  how many there may be, and which one makes room for another
    app.py          which path leads where; models, health, metrics; request ids; what pages in browsers may ask
    generation.py   one call: body -> GenerateRequests -> front/intake.py, side by side -> JSON or events
    body.py         the bytes of a body, counted and parsed, and typed access to its fields
    content.py      the content of messages and items as text
    parameters.py   fields all endpoints share -> GenerateRequest; those that are refused by name
    constraints.py  what an output is constrained to, in each of its spellings
    tools.py        tools and calls of them, read and written as OpenAI does
    completions.py  /v1/completions: its fields, and how its choices are written
    chat.py         /v1/chat/completions: the same
    responses/      /v1/responses
    tokenise.py     /tokenize and /detokenize
    answers.py      calls of completions and chats, and their answers as one JSON object or as the events of a stream
    prompt_scores.py  log-probabilities of prompts, in OpenAI's form and in vLLM's
    text_places.py  where the tokens of an answer begin in its text
    reply.py        what goes out: JSON, events, comments in a stream that is silent for long, errors and their statuses

Ranges are checked where gRPC's are (services/router/front/validation.py); here only types are.
"""
