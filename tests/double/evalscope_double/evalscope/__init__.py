"""A double of the ``evalscope`` package: as much of it as the run's driver touches."""

__version__ = "1.9.1"
