"""Locks files against other processes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from typing import BinaryIO

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre mounted without flock; NFS without its service


def lock(file: BinaryIO) -> bool:
    """Lock a file, open for writing, until it is closed or the process ends, however it does. False: another has it.

    On a file system without locks it warns, and returns True. Raises OSError that names the file.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        path = os.readlink(f"/proc/self/fd/{file.fileno()}")
        if error.errno not in _NO_LOCKS:
            raise OSError(error.errno, error.strerror, path) from error
        said = "%s cannot be locked (%s): nothing keeps a second process out, so start none (slurm/README.md)"
        logger.warning(said, path, error.strerror)
    return True
