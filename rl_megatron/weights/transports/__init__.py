"""Transports, which execute plans. The only part of this room that imports torch.distributed."""
