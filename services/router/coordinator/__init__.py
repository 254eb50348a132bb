"""Coordinates requests and workers without I/O. Pure in every module."""

from services.router.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]
