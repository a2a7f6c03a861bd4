"""`python -m ringtrain` is `ringtrain`."""

from ringtrain.cli import main

raise SystemExit(main())
