"""Who talks: only this folder calls the collectives of torch.distributed."""
