"""The AXDIMM family, emulated: kernels alone, whole DIMMs, benches."""
