"""Provides a router whose tenants the module's `file` has."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest

from tests.support.cluster import Cluster
from tests.support.tenants import TenantsFile, http_client, serving


@pytest.fixture
async def cluster(model: str, file: TenantsFile) -> AsyncIterator[Cluster]:
    async with serving(model, file) as cluster:
        yield cluster


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with http_client(cluster) as http:
        yield http
