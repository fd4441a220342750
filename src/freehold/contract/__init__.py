"""What both sides of a step say: pure data that scheduler and worker share. Imports nothing else of Freehold."""
