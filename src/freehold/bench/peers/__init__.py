"""Other engines, installed separately and measured beside ours."""
