"""What `worker-client` runs: demo, doctor and launch."""
