#!/usr/bin/env python3
"""`strata chaos` under the name of the harness's script: same options, same report, same exit status."""

import sys

from strata.cli.main import main

if __name__ == "__main__":
    sys.argv = ["strata", "chaos", *sys.argv[1:]]
    main()
