"""Where the names come from that ringtrain.hvd takes from Horovod: from Horovod, or from mpi4py without it.

`RINGTRAIN_COLLECTIVES=mpi4py`, set before ringtrain.hvd is imported, asks for the second: `by_mpi.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ringtrain.reports import ALONE, COLLECTIVES

WITH_HOROVOD = os.environ.get(COLLECTIVES) not in ("mpi4py", ALONE)

if TYPE_CHECKING or WITH_HOROVOD:
    import horovod.tensorflow as horovod
    from horovod.common.elastic import ObjectState as ObjectState
    from horovod.common.elastic import notification_manager as notification_manager
    from horovod.common.exceptions import HorovodInternalError as HorovodInternalError
    from horovod.common.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt
    from horovod.runner.common.util import network as network
else:
    from ringtrain.hvd import by_mpi as horovod


def __getattr__(name: str) -> Any:
    return getattr(horovod, name)
