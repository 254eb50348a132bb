"""Serves OpenAI-style HTTP: requests and answers have another form than over gRPC, and take the same way through the
router.

    server.py       uvicorn inside the router's event loop, and TLS
    connection.py   connections: what uvicorn is given of each and what it may cost, how many there may be
    app.py          which path leads where; models, health, metrics; request ids; what pages in browsers may ask
    generation.py   one call: body -> GenerateRequests -> front/intake.py, side by side -> JSON or events
    body.py         the bytes of a body, counted and parsed, and typed access to its fields
    content.py      the content of messages and items as text
    parameters.py   fields all endpoints share -> GenerateRequest, constraints in each of their spellings among them;
                    those that are refused by name
    tools.py        tools and calls of them, read and written as OpenAI does
    completions.py  /v1/completions: its fields, and how its choices are written
    chat.py         /v1/chat/completions: the same
    responses/      /v1/responses
    tokenise.py     /tokenize and /detokenize
    answers.py      calls of completions and chats, and their answers as one JSON object or as the events of a stream;
                    log-probabilities of prompts, in OpenAI's form and in vLLM's
    reply.py        what goes out: JSON, events, comments in a stream that is silent for long, errors and their statuses

Ranges are checked where gRPC's are (services/router/front/validation.py); here only types are.
"""
