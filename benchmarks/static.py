"""`monoloop bench static` of this checkout: python -m benchmarks.static --shape llama-8b --batch 1,16."""

import sys

from server.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "static", *sys.argv[1:]]))
