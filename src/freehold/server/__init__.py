"""HTTP, tokenizing and streaming in one process; scheduler and engine in another, so that HTTP never
stalls a step."""
