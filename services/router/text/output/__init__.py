"""Takes a model's output apart: what it thinks, what it answers, and which tools it asks for. Pure.

Each family of models writes calls of tools in a form of its own (`families`), into the one text that it outputs. The
parsers here are given that text in pieces, as it becomes known, and give back what each piece adds. Whatever the
pieces are, the sum is the same. What turns out to be no call is given back as text: nothing is lost.
"""
