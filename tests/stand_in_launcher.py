"""Stands for parallel.runtime.launch: runs FOLDER/ROLE.sh with the host's address and the attempt."""

import os
import sys

arguments = sys.argv[1:]
option = dict(zip(arguments, arguments[1:]))
folder, role = arguments[-3], arguments[-1]
attempt = option["--rdzv-id"].rpartition("-")[2]
os.execv("/bin/bash", ["bash", f"{folder}/{role.replace(':', '')}.sh", option["--local-addr"], attempt])
