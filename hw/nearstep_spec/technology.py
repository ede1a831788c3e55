"""FPGAs that datapaths are divided into stages for."""

TECHNOLOGIES = ("ultrascale_plus", "ecp5")
"""Names; the first is the default."""
