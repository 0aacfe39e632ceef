"""Train: `deepspeed launch/train.py --ds-config … --config …`, or under torchrun, accelerate launch or python."""

from bigdit.launch import main

main()
