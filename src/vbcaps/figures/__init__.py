"""Pictures, drawn from recorded files."""
