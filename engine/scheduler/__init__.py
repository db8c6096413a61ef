"""What each step computes: admission, chunking, retraction."""
