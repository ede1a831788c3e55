"""The AXDIMM family: a near-memory Adam kernel."""
