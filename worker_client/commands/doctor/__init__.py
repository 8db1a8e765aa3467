"""`worker-client doctor`: what was detected, and whether every reducer can be worked with."""
