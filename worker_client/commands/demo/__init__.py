"""The demo: the same training through reducers and through Gloo, side by side."""
