"""Coordinates requests and workers without I/O. Every module here is pure."""

from services.router.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]
