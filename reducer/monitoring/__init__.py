"""What a reducer says about itself: status, metrics, HTTP."""
