"""The SmartSSD family, emulated: cards and their BARs."""
