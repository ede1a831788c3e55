"""`python -m nearstep` is the `nearstep` command."""

from nearstep.cli import main

main()
