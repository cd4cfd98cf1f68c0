"""Peak memory of this process, read without importing torch: a rival's process uses it too."""

import sys


def peak_host_memory_gb() -> float:
    """Largest resident memory so far, GB of 10^9 bytes; NaN on Windows, which does not tell."""
    try:
        import resource  # late: Windows has none
    except ImportError:
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
