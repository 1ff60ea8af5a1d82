"""Records training steps under a profiler, and reads what it wrote: where the time goes, and the memory."""
