"""The public object, and the way from settings to one: who this is, where ranks meet."""
