"""`worker-client doctor --gain`: measures a training, and predicts other ways to average."""
