"""Other engines, installed apart and measured beside ours."""
