"""How many threads tokenise the long texts of the router's own model: half of its cores, unless the flag says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.router.main import Router, RouterConfig
from services.rpc.telemetry import Tracer, configure_tracing
from tests.support.text_model import write_model

from threading import enumerate as all_threads
