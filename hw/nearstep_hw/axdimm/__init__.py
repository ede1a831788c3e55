"""The AXDIMM family: an arbiter that shares a DRAM between its host and update kernels."""
