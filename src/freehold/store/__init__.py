"""KV that outlives the process: entries of bytes under keys that name their content. Independent of pages."""
