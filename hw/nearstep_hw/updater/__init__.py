"""The update kernel that families share: movers, functional units, registers."""
