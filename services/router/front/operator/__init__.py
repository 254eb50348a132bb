"""Serves operators and workers on the control port: status, timelines, explanations, drains, registrations."""
