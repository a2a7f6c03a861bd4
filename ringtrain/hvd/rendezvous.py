"""Addresses that Gloo leaves in Horovod's rendezvous server, to which `init` after `shutdown` would connect."""

from __future__ import annotations

import contextlib
import os
import urllib.request
from http.client import HTTPException
from urllib.error import HTTPError

from ringtrain.hvd.backend import horovod

TIMEOUT_S = 10
MAX_COUNTS = 10


def forget_addresses() -> None:
    """Removes the addresses of this rendezvous from the server; each rank calls it after Horovod's `init`.

    Horovod's server removes the addresses of a scope when all its ranks are connected. It then also forgets which ranks
    of other scopes are, and keeps the addresses of these. They are complete here, as `init` connects all ranks again.
    """
    address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
    if not address or not horovod.gloo_enabled():
        return
    local_scope = f"local_{os.environ.get('HOROVOD_HOSTNAME', 'localhost')}"
    scopes = {
        "global": (horovod.rank(), horovod.size()),
        local_scope: (horovod.local_rank(), horovod.local_size()),
        f"cross_{horovod.local_rank()}": (horovod.cross_rank(), horovod.cross_size()),
    }
    with contextlib.suppress(OSError, HTTPException):  # the server has ended, and no rank can start again
        for scope, (rank, size) in scopes.items():
            if rank == 0:
                _remove(f"http://{address}:{port}/{scope}/0", size)


def _remove(key: str, num_ranks: int) -> None:
    """Removes the scope of a key: the server does so after as many deletions as the scope has ranks.

    It begins to count again whenever another scope is complete.
    """
    client = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not by the user's proxy
    delete = urllib.request.Request(key, method="DELETE")
    for _ in range(MAX_COUNTS * num_ranks):
        try:
            client.open(key, timeout=TIMEOUT_S).close()
        except HTTPError:
            return  # it is not there
        client.open(delete, timeout=TIMEOUT_S).close()
