"""FPGAs that determine the pipeline stages of datapaths."""

TECHNOLOGIES = ("ultrascale_plus", "ecp5")
"""Names; the first is the default."""
