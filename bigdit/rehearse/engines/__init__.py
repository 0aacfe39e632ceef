"""What DeepSpeed and FSDP2 ask of their device and of their peers, answered on the fake one."""
