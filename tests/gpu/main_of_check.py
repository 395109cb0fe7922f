"""The process of one check: `python -m gpu.main_of_check NAME FOLDER DEVICE`."""

import sys

from gpu.main import check_of

if __name__ == "__main__":
    check_of(sys.argv[1:])
