"""HTTP, tokenization and streaming run in one process, the scheduler and engine in another, so that HTTP never stalls a
step."""
