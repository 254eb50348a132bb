"""Keeps verdicts beside a worker's KV on disk, which outlives the process as that does.

Without them, a cluster that was stopped as a whole would find on its disks, under their first names, blocks that a
wrong worker has computed.
"""

from __future__ import annotations

import json
import logging
import operator
import os
from collections.abc import Mapping
from pathlib import Path

from services.core.ids import new_incarnation
from services.core.own_files import opened, write_whole
from services.kv.verdicts import Verdicts

log = logging.getLogger(__name__)


class KeptVerdicts(Verdicts):
    """Keeps the verdicts that this process has heard of and, as its file says, those before it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        try:
            with open(opened(path, os.O_RDONLY), "rb") as file:
                super().merge({int(each): operator.index(number) for each, number in json.load(file).items()})
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read, so what the disk holds is not used: %s", path, error)
            self.add(new_incarnation())  # an epoch that nothing on the disk is named in

    def merge(self, num_of: Mapping[int, int]) -> list[int]:
        if news := super().merge(num_of):
            try:
                write_whole(self._path, json.dumps(self.num_of).encode())
            except OSError as error:
                log.warning("a verdict on a worker is not kept: %s", error)
        return news
