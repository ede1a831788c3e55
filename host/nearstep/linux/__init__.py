"""A card as a PCI function that a Linux drives: below a virtual machine, over a UNIX socket."""
