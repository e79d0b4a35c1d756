"""`python -m verl_megatron COMMAND ...`: the command line, as `verl-megatron`."""

import sys

from verl_megatron.commands import main

if __name__ == "__main__":
    sys.exit(main())
