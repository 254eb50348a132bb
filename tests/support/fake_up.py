"""Runs `baton up` over fake services: `fake_up.py FOLDER` starts one router, one prefill and one decode worker."""

from __future__ import annotations

import asyncio
import pathlib
import sys

from services.cli.cluster import ClusterPlan, PlannedWorker
from services.cli.model_cache import ResolvedModel
from services.cli.plan import CoreShare
from services.cli.up import supervise

FAKE_SERVICE = pathlib.Path(__file__).with_name("fake_service.py")


def make_plan() -> ClusterPlan:
    workers = [PlannedWorker(f"{role}-0", role, 0, CoreShare((0,), 1, own=False)) for role in ("prefill", "decode")]
    return ClusterPlan(
        model=ResolvedModel("fake", pathlib.Path("/nowhere")),
        host="127.0.0.1",
        port=0,
        router_metrics_port=0,
        workers=tuple(workers),
        drain_s=5.0,
    )


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(supervise(make_plan(), (sys.executable, str(FAKE_SERVICE), sys.argv[1]))))
    except ExceptionGroup as group:
        sys.exit(str(group.exceptions[0]))
