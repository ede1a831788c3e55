"""Control and status registers: bank, decoder and bus adapters."""
