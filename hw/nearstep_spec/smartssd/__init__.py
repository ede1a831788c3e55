"""The SmartSSD family: configuration of a card."""
