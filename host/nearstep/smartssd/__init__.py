"""Host driver of the SmartSSD family."""
