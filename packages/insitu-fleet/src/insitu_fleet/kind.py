"""The extension of kind `fleets`: nodes in child processes, or on the machines of a Ray cluster."""

from __future__ import annotations

from insitu_fleet.check import check_fleet
from insitu_fleet.controller import open_fleet


class NodeFleet:
    """What `find("fleets", fleet.kind)` gives."""

    open = staticmethod(open_fleet)
    check = staticmethod(check_fleet)
