"""Train a policy and compare it with the rules: `python train.py --help`."""

import sys

from vllm_tenant_tuning.baselines.training import main

if __name__ == "__main__":
    sys.exit(main())
