"""Coordination of requests and workers, without I/O. Pure, every module of it."""

from services.router.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]
