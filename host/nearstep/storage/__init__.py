"""Storage of tensors in files: snapshots, and drives with generations."""
