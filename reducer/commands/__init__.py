"""What `reducer` runs besides `serve`: status, top, plan and keygen."""
