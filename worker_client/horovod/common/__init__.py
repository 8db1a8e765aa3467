"""What the interfaces of all frameworks have in common, by Horovod's names of modules."""
