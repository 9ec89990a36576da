"""What executes a plan. The only part of this room that imports torch.distributed."""
