"""NCCL's plug-in, through which unchanged programs for GPUs use reducers."""
