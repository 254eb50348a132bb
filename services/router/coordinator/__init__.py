"""Coordination of requests and workers, sans I/O (DESIGN §4, §5). Every module here is pure."""

from services.router.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]
