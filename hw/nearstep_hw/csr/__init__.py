"""Control and status registers: declaration, bank, bus adapters, exports."""
