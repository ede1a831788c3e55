"""Host driver of the AXDIMM family."""
