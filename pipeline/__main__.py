"""`python -m smelt` is the command line."""

from smelt.cli import main

main()
