"""The base of every error that the four packages raise on purpose."""

__all__ = ["NearstepError"]


class NearstepError(Exception):
    """Base of every error that nearstep raises on purpose."""
