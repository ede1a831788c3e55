"""Models of the RTL's environment: memories, DRAM, links."""
