"""Control and status registers: declarations, and their exports."""
