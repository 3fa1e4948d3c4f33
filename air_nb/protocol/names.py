"""Reserved names inside payloads and results; no variable of the user's can be called so."""

__all__ = ["ERROR", "FUNCTION", "RESULT", "WARNING_FILTERS"]

FUNCTION = "air_nb function"
"""In a payload: the ``DistributedFunction``."""
RESULT = "air_nb result"
"""In a rank's values: the last expression's value, or the function's return value."""
ERROR = "air_nb error"
"""In a rank's error file: the exception."""
WARNING_FILTERS = "air_nb warning filters"
"""In a payload: the kernel's ``warnings.filters``."""
