"""The table [fleet]: where attempts run."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import model_validator

from insitu.config.base import CountOrZero, Seconds, Table, only, unless

_FLEET = unless("kind", "none")


class FleetTable(Table):
    """Other processes or machines that run attempts: gateway, agents, sandboxes, grading."""

    kind: Literal["none", "processes", "ray"] = "none"
    """none = in this process; processes = child processes of this machine, each with its own gateway; ray =
    one process on each machine of a Ray cluster."""
    nodes: Annotated[CountOrZero, _FLEET] = 0
    """Nodes of the fleet; each runs harness.workers rollouts at the same time and grade.workers gradings;
    0 = all machines of the Ray cluster."""
    address: Annotated[str, only("kind", "ray")] = "auto"
    """HOST:PORT of the Ray cluster's head; auto = the cluster that `ray start` has made on this machine."""
    lease_s: Annotated[Seconds, _FLEET] = 60.0
    """A node that does not reach the controller for this time ends its agents and sandboxes and exits. One
    that does not answer for a quarter of it is lost: its attempts are repeated on other nodes."""

    @property
    def beat_s(self) -> float:
        """Seconds between two calls that renew a node's lease."""
        return self.lease_s / 20

    @property
    def lost_s(self) -> float:
        """Seconds without an answer after which a node is lost."""
        return self.lease_s / 4

    @model_validator(mode="after")
    def _names_nodes(self) -> Self:
        if self.kind == "processes" and not self.nodes:
            raise ValueError("kind = 'processes' needs nodes: how many processes to start")
        host, _, port = self.address.rpartition(":")
        place = host and "/" not in host and port.isdecimal() and int(port) < 1 << 16
        if self.address != "auto" and not place:
            raise ValueError(f"address {self.address!r} is neither auto nor HOST:PORT")
        return self
