"""What devices hold, in files: snapshots, and drives with generations of tensors."""
