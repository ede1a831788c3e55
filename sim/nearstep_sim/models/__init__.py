"""Models of what is around the RTL: memories, DRAM, links."""
