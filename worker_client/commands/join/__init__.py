"""`worker-client join`: unlike machines meet, measure themselves, and train one model."""
