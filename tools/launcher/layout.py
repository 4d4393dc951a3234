"""Who runs where, and with whom a job goes on when a host or a worker is lost."""

from __future__ import annotations

from collections import Counter
from typing import Collection, Sequence

from dsoftmax.tools.launcher.hosts import LOCAL, Host, Place, deal


class Layout:
    """The processes of a job, dealt out over hosts.

    Parameters
    ----------
    hosts : sequence of Host
    workers : int
    servers : int, optional
        By default as many as workers.
    fewest : int
        The number of workers without which the job does not go on.

    Attributes
    ----------
    places : list of Place
    workers, servers, fewest : int
    """

    def __init__(self, hosts: Sequence[Host], workers: int, servers: int | None, fewest: int):
        self.workers, self.servers, self.fewest = workers, servers or workers, fewest
        self.places = deal(hosts, self.servers, workers)
        self._hosts, self._servers = hosts, servers

    @property
    def elsewhere(self) -> list[str]:
        """The hosts that are used, but for this one."""
        return list(dict.fromkeys(place.host for place in self.places if place.host not in LOCAL))

    @property
    def uses_this_host(self) -> bool:
        """Whether some of the processes run here."""
        return any(place.host in LOCAL for place in self.places)

    def without_hosts(self, names: Collection[str]) -> Layout | None:
        """Return the layout without some hosts and their workers, or None if too few are left."""
        return self._fewer({name: self._slots()[name] for name in names})

    def without_worker(self, place: Place) -> Layout | None:
        """Return the layout with one worker less on a host, or None if too few are left."""
        if place.role != "worker":
            return None
        return self._fewer({place.host: 1})

    def _slots(self) -> Counter[str]:
        """Return how many workers each host has."""
        return Counter(place.host for place in self.places if place.role == "worker")

    def _fewer(self, lost: dict[str, int]) -> Layout | None:
        slots = self._slots()
        slots.subtract(lost)
        workers = sum(slots.values())
        first = self._hosts[0].name
        # The first worker must stay where it is: only its host need have the states.
        if workers < self.fewest or not slots[first]:
            return None
        names = dict.fromkeys(host.name for host in self._hosts)
        hosts = [Host(name, slots[name]) for name in names if slots[name] or name not in lost]
        return Layout(hosts, workers, self._servers, self.fewest)
