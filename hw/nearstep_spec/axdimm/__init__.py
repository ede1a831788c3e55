"""The AXDIMM family: module, arbiter registers, bounds of a change of mode."""
