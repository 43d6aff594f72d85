"""`python -m cosmos_core.cli`: the same as `cosmos`."""

from cosmos_core.cli.main import main

main()
