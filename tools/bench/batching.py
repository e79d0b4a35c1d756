"""`verl-megatron benchmark batching`, where nothing is installed."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    root = str(Path(__file__).resolve().parents[2])
    sys.path.insert(0, root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    sys.argv[1:1] = ["benchmark", "batching"]
    runpy.run_module("verl_megatron", run_name="__main__", alter_sys=True)
