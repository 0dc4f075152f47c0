"""How many files this process may have open: connections are files."""

import logging
import resource

logger = logging.getLogger("monoloop.server")

# What to ask for: macOS calls its limit infinite and takes no more than the second.
LIMITS = (65_536, 10_240)


def raise_file_limit() -> None:
    """Allow as many open files as the system does, up to 65,536: the usual 1,024 are few for a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in LIMITS:
        limit = limit if hard == resource.RLIM_INFINITY else min(hard, limit)
        if soft == resource.RLIM_INFINITY or soft >= limit:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError):
            continue
        return
    logger.warning("the system refuses more than %d open files: that limits the number of connections", soft)


def file_limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LIMITS[0] if soft == resource.RLIM_INFINITY else soft
