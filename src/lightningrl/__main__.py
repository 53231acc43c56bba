"""`python -m lightningrl`, the same as `lightningrl`."""

from lightningrl.cli import main

main()
